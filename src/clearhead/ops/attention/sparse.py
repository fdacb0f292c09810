"""Sparse attention that does less work, not only hides positions: plain torch, on any device, with gradients.

B rows · H heads · G key-value heads · T tokens · E head width · l size of the pattern

Each function rearranges queries and keys so that plain attention over small pieces is the pattern. Queries and keys
stand at the same positions. Where the mask is causal, padding behind the last token is later than every real query
and needs no hiding; otherwise it is hidden by length.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.attention.sdpa import sdpa
from clearhead.ops.masks import Mask, Pattern


def attend_sparse(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Attention of q (B, H, T, E) over k and v (B, G, T, E) by the mask's pattern."""
    way = {"window": window, "column": column, "block": block, "summary": summary}[mask.pattern.kind]
    return way(q, k, v, mask, dropout)


def window(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Block by block of queries, over the few blocks of keys that the window reaches."""
    tokens, size = q.shape[2], mask.pattern.size
    step = max(64, size // 2)
    reach = -(-(size - 1) // step)  # blocks to each side that hold a visible key
    num_draft_tokens = 0 if mask.causal else reach
    # For gradients, splitting and joining, not slicing: the gradient of n slices is n tensors of full length.
    queries, keys, values = (x.split(step, dim=2) for x in (q, k, v))
    tables: dict[tuple[int, int, int], Tensor] = {}  # most blocks see their neighborhood the same way

    def blocks() -> Iterator[Tensor]:
        for n, piece in enumerate(queries):
            first, last = max(0, n - reach), min(len(keys), n + num_draft_tokens + 1)
            begin, end = first * step, min(last * step, tokens)
            if torch.is_grad_enabled():
                near = torch.cat(keys[first:last], dim=2), torch.cat(values[first:last], dim=2)
            else:
                near = k[:, :, begin:end], v[:, :, begin:end]
            i = torch.arange(n * step, n * step + piece.shape[2], device=q.device)[None]
            j = torch.arange(begin, end, device=q.device)
            if mask.needs_padding_mask:
                yield sdpa(piece, *near, mask.between(i, j), dropout)
                continue
            case = (n - first, piece.shape[2], end - begin)
            if case not in tables:
                tables[case] = _to_add(Mask(mask.causal, mask.pattern).between(i, j), q)
            yield sdpa(piece, *near, tables[case], dropout, no_empty_rows=True)

    return _join(blocks(), q)


def column(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Every l-th position is a sequence of its own: reshaped to (T/l, l), each column is plain attention."""
    size, tokens, heads = mask.pattern.size, q.shape[2], q.shape[1]
    # (B, H, T, E) to (B, l·H, T/l, E): the l columns stand beside the heads, and stay views of (B, T, H, E).
    real = _real(q, mask, size)  # (B, T/l, l)
    if real is not None:
        real = real.transpose(1, 2).repeat_interleave(heads, dim=1)[:, :, None]  # (B, l·H, 1, T/l)
    q, k, v = (_rows(x, size).flatten(2, 3).transpose(1, 2) for x in (q, k, v))
    out = sdpa(q, k, v, real, dropout, causal=mask.causal)
    return out.transpose(1, 2).unflatten(2, (size, heads)).flatten(1, 2).transpose(1, 2)[:, :, :tokens]


def block(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Every block of l positions is a row of its own."""
    size, tokens, rows = mask.pattern.size, q.shape[2], q.shape[0]
    blocks = -(-tokens // size)
    real = _real(q, mask, size)  # (B, T/l, l)
    if real is not None:
        real = real.flatten(0, 1)[:, None, None]  # (B·T/l, 1, 1, l)
    q, k, v = (_rows(x, size).flatten(0, 1).transpose(1, 2) for x in (q, k, v))  # (B·T/l, H, l, E)
    out = sdpa(q, k, v, real, dropout, causal=mask.causal)
    return out.transpose(1, 2).unflatten(0, (rows, blocks)).flatten(1, 2).transpose(1, 2)[:, :, :tokens]


def summary(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0, chunk: int = 512) -> Tensor:
    """The last positions of every block are gathered; all queries look at those alone, a chunk of queries at a time."""
    tokens, pattern = q.shape[2], mask.pattern
    places = torch.arange(tokens, device=q.device)
    if gathered := summaries(tokens, pattern):
        j = places[places % pattern.size >= pattern.size - pattern.summary]  # (S,) where the gathered keys stood
        k, v = gather_summaries(k, pattern), gather_summaries(v, pattern)
    else:  # the row ends before its first summary: the mask hides every key, and zeros come out
        j, gathered = places, tokens
    if not mask.needs_padding_mask:
        mask = replace(mask, lengths=None)

    def chunks() -> Iterator[Tensor]:
        for number, queries in enumerate(q.split(chunk, dim=2)):
            first, last = number * chunk, number * chunk + queries.shape[2]
            seen = max(1, summaries(last, pattern)) if mask.causal else gathered
            allowed = mask.between(places[None, first:last], j[:seen])
            all_see = first >= pattern.size and mask.lengths is None  # whoever has a whole block behind
            yield sdpa(queries, k[:, :, :seen], v[:, :, :seen], allowed, dropout, no_empty_rows=all_see)

    return _join(chunks(), q)


def summaries(tokens: int, pattern: Pattern) -> int:
    """How many of the first `tokens` positions are summaries."""
    return tokens // pattern.size * pattern.summary + max(0, tokens % pattern.size - (pattern.size - pattern.summary))


def gather_summaries(x: Tensor, pattern: Pattern) -> Tensor:
    """The keys or values (B, G, T, E) at summary positions: (B, G, S, E)."""
    size, first = pattern.size, pattern.size - pattern.summary
    if x.shape[2] < size:  # one block, not complete
        return x[:, :, first:]
    blocks = _fill(x, size).unflatten(2, (-1, size))  # (B, G, T/l, l, E)
    return blocks[:, :, :, first:].flatten(2, 3)[:, :, : summaries(x.shape[2], pattern)]


def _join(pieces: Iterator[Tensor], q: Tensor) -> Tensor:
    """The pieces one after the other, shaped like q; without gradients each is put in place at once, not held twice."""
    if torch.is_grad_enabled():
        return torch.cat(list(pieces), dim=2)
    out, at = torch.empty_like(q), 0
    for piece in pieces:
        out[:, :, at : at + piece.shape[2]] = piece
        at += piece.shape[2]
    return out


def _to_add(allowed: Tensor | None, q: Tensor) -> Tensor:
    """A mask in the form that torch adds to the scores, so that it is not made anew for every block."""
    assert allowed is not None
    return torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill(~allowed, -math.inf)


def _fill(x: Tensor, size: int) -> Tensor:
    """(B, H, T, E) with zeros behind, so that `size` divides T."""
    lacking = -x.shape[2] % size
    return F.pad(x, (0, 0, 0, lacking)) if lacking else x


def _rows(x: Tensor, size: int) -> Tensor:
    """(B, H, T, E) as rows of `size` positions: (B, T/size, size, H, E)."""
    return _fill(x, size).transpose(1, 2).unflatten(1, (-1, size))


def _real(q: Tensor, mask: Mask, size: int) -> Tensor | None:
    """Which keys are real, (B, T/size, size), where that has to be asked."""
    tokens = q.shape[2]
    if mask.causal or (mask.lengths is None and tokens % size == 0):
        return None
    lengths = mask.lengths if mask.lengths is not None else torch.full((q.shape[0],), tokens, device=q.device)
    places = torch.arange(tokens + -tokens % size, device=q.device)
    return (places < lengths[:, None]).unflatten(1, (-1, size))
