"""Sparse attention that skips masked keys, in plain torch: on any device, with gradients.

B batch · H heads · G key-value heads · T tokens · S gathered keys · E head dim · l size of the pattern

Each function rearranges queries and keys so that dense attention over small blocks computes the pattern. Queries and
keys are at the same positions. Under a causal mask padding comes after every query that counts and needs no mask;
otherwise it is masked by length.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.attention.sdpa import sdpa
from clearhead.ops.masks import Mask, Pattern

MIN_WINDOW_BLOCK = 64  # queries


def sparse_refuses(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> str | None:
    """Return why sparse attention cannot be used, or None if it can."""
    if mask.pattern.kind == "full":
        return "the mask is not sparse"
    if mask.documents is not None:
        return "the row is packed"
    if mask.start is not None or q.shape[2] != k.shape[2]:
        return "queries and keys are not the same positions"
    return None


def attend_sparse(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Attention of q (B, H, T, E) over k and v (B, G, T, E) by the mask's pattern."""
    attend_pattern = {"window": window, "column": column, "block": block, "summary": summary}[mask.pattern.kind]
    return attend_pattern(q, k, v, mask, dropout)


def window(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Attend in blocks of queries, each to the blocks of keys that its window overlaps."""
    tokens, size = q.shape[2], mask.pattern.size
    step = max(MIN_WINDOW_BLOCK, size // 2)
    before = -(-(size - 1) // step)  # blocks on each side that hold a visible key
    after = 0 if mask.causal else before
    # With gradients, split and cat: the gradient of n slices would be n tensors of the full length.
    queries, keys, values = (x.split(step, dim=2) for x in (q, k, v))
    biases: dict[tuple[int, int, int], Tensor] = {}  # most blocks share one

    def blocks() -> Iterator[Tensor]:
        for n, q_block in enumerate(queries):
            first, last = max(0, n - before), min(len(keys), n + after + 1)
            begin, end = first * step, min(last * step, tokens)
            if torch.is_grad_enabled():
                nearby = torch.cat(keys[first:last], dim=2), torch.cat(values[first:last], dim=2)
            else:
                nearby = k[:, :, begin:end], v[:, :, begin:end]
            i = torch.arange(n * step, n * step + q_block.shape[2], device=q.device)[None]
            j = torch.arange(begin, end, device=q.device)
            if mask.needs_padding_mask:
                yield sdpa(q_block, *nearby, mask.between(i, j), dropout)
                continue
            key = (n - first, q_block.shape[2], end - begin)
            if key not in biases:
                biases[key] = _additive(Mask(mask.causal, mask.pattern).between(i, j), q)
            yield sdpa(q_block, *nearby, biases[key], dropout, no_empty_rows=True)

    return _cat_blocks(blocks(), q)


def column(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Attend in each column, every l-th position, as a sequence of its own."""
    size, tokens, heads = mask.pattern.size, q.shape[2], q.shape[1]
    # (B, H, T, E) to (B, l·H, T/l, E): columns join the heads, which leaves q, k and v views of (B, T, H, E).
    padding_mask = _padding_mask(q, mask, size)  # (B, T/l, l)
    if padding_mask is not None:
        padding_mask = padding_mask.transpose(1, 2).repeat_interleave(heads, dim=1)[:, :, None]  # (B, l·H, 1, T/l)
    q, k, v = (_blocks(x, size).flatten(2, 3).transpose(1, 2) for x in (q, k, v))
    out = sdpa(q, k, v, padding_mask, dropout, causal=mask.causal)
    return out.transpose(1, 2).unflatten(2, (size, heads)).flatten(1, 2).transpose(1, 2)[:, :, :tokens]


def block(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Attend in each block of l positions, as a row of its own."""
    size, tokens, rows = mask.pattern.size, q.shape[2], q.shape[0]
    blocks = -(-tokens // size)
    padding_mask = _padding_mask(q, mask, size)  # (B, T/l, l)
    if padding_mask is not None:
        padding_mask = padding_mask.flatten(0, 1)[:, None, None]  # (B·T/l, 1, 1, l)
    q, k, v = (_blocks(x, size).flatten(0, 1).transpose(1, 2) for x in (q, k, v))  # (B·T/l, H, l, E)
    out = sdpa(q, k, v, padding_mask, dropout, causal=mask.causal)
    return out.transpose(1, 2).unflatten(0, (rows, blocks)).flatten(1, 2).transpose(1, 2)[:, :, :tokens]


def summary(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0, chunk: int = 512) -> Tensor:
    """Gather the last positions of every block, and attend to those only, a chunk of queries at a time."""
    tokens, pattern = q.shape[2], mask.pattern
    positions = torch.arange(tokens, device=q.device)
    if count := count_summaries(tokens, pattern):
        j = positions[positions % pattern.size >= pattern.size - pattern.summary]  # (S,), positions before gathering
        k, v = gather_summaries(k, pattern), gather_summaries(v, pattern)
    else:  # the row ends before its first summary: every key is masked, and the output is zeros
        j, count = positions, tokens
    if not mask.needs_padding_mask:
        mask = replace(mask, lengths=None)

    def chunks() -> Iterator[Tensor]:
        for number, queries in enumerate(q.split(chunk, dim=2)):
            first, last = number * chunk, number * chunk + queries.shape[2]
            visible = max(1, count_summaries(last, pattern)) if mask.causal else count
            dense = mask.between(positions[None, first:last], j[:visible])
            no_empty_rows = first >= pattern.size and mask.lengths is None  # a whole block comes before
            yield sdpa(queries, k[:, :, :visible], v[:, :, :visible], dense, dropout, no_empty_rows=no_empty_rows)

    return _cat_blocks(chunks(), q)


def count_summaries(tokens: int, pattern: Pattern) -> int:
    """Return how many of the first `tokens` positions are summaries."""
    return tokens // pattern.size * pattern.summary + max(0, tokens % pattern.size - (pattern.size - pattern.summary))


def gather_summaries(x: Tensor, pattern: Pattern) -> Tensor:
    """Gather keys or values (B, G, T, E) at summary positions: (B, G, S, E)."""
    size, first = pattern.size, pattern.size - pattern.summary
    if x.shape[2] < size:  # one incomplete block
        return x[:, :, first:]
    blocks = _pad_to_multiple(x, size).unflatten(2, (-1, size))  # (B, G, T/l, l, E)
    return blocks[:, :, :, first:].flatten(2, 3)[:, :, : count_summaries(x.shape[2], pattern)]


def _cat_blocks(blocks: Iterator[Tensor], q: Tensor) -> Tensor:
    """Concatenate blocks of queries to the shape of q; without gradients in place, to hold each block only once."""
    if torch.is_grad_enabled():
        return torch.cat(list(blocks), dim=2)
    out, start = torch.empty_like(q), 0
    for x in blocks:
        out[:, :, start : start + x.shape[2]] = x
        start += x.shape[2]
    return out


def _additive(mask: Tensor | None, q: Tensor) -> Tensor:
    """Convert a boolean mask to an additive bias once, which torch would do in every call."""
    assert mask is not None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)


def _pad_to_multiple(x: Tensor, size: int) -> Tensor:
    """Zero-pad (B, H, T, E) at the end so that `size` divides T."""
    missing = -x.shape[2] % size
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _blocks(x: Tensor, size: int) -> Tensor:
    """Split (B, H, T, E) into blocks of `size` positions: (B, T/l, l, H, E)."""
    return _pad_to_multiple(x, size).transpose(1, 2).unflatten(1, (-1, size))


def _padding_mask(q: Tensor, mask: Mask, size: int) -> Tensor | None:
    """Return the padding mask in blocks, (B, T/l, l), or None if none is needed."""
    tokens = q.shape[2]
    if mask.causal or (mask.lengths is None and tokens % size == 0):
        return None
    lengths = mask.lengths if mask.lengths is not None else torch.full((q.shape[0],), tokens, device=q.device)
    positions = torch.arange(tokens + -tokens % size, device=q.device)
    return (positions < lengths[:, None]).unflatten(1, (-1, size))
