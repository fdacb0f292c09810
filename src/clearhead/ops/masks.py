"""Which keys a query may look at, as values.   B rows · T queries · S keys · N tokens and D documents of a packed row

A mask says what is allowed; how attention makes use of that is `attend`'s business. Every mask has a dense form, the
truth table, and is plain enough that a fast path can see its structure instead of its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.config import ModelConfig


class Pattern(NamedTuple):
    """What one layer looks at, for a query at position i and a key at position j.

    full      everything
    window    the nearest: |i - j| < size
    column    every size-th: (i - j) mod size = 0
    block     the same block: ⌊i / size⌋ = ⌊j / size⌋
    summary   the last `summary` positions of each block: j mod size ≥ size - summary

    Sparse Transformers (Child et al. 2019) calls window and column together "strided", block and summary "fixed".
    """

    kind: Literal["full", "window", "column", "block", "summary"] = "full"
    size: int = 0
    summary: int = 0

    def allows(self, i: Tensor, j: Tensor) -> Tensor | None:
        """True where position i may look at position j, over the broadcast of the two; None for everywhere."""
        match self.kind:
            case "window":
                return (i - j).abs() < self.size
            case "column":
                return (i - j) % self.size == 0
            case "block":
                return i // self.size == j // self.size
            case "summary":
                return (j % self.size >= self.size - self.summary).expand(torch.broadcast_shapes(i.shape, j.shape))
        return None


FULL = Pattern()


def patterns(config: ModelConfig, layers: int) -> list[Pattern]:
    """The pattern of each layer: `config.attention` in turn; strided and fixed layers take their two halves in turn."""
    stride = config.stride or 0
    halves = {
        "full": [FULL],
        "window": [Pattern("window", config.window or 0)],
        "strided": [Pattern("window", stride + 1), Pattern("column", stride)],
        "fixed": [Pattern("block", stride), Pattern("summary", stride, config.summary or 0)],
    }
    chosen, used = [], dict.fromkeys(halves, 0)
    for layer in range(layers):
        name = config.attention[layer % len(config.attention)]
        chosen.append(halves[name][used[name] % len(halves[name])])
        used[name] += 1
    return chosen


@dataclass(frozen=True)
class Documents:
    """Documents one after the other in a single row of N tokens, without padding; none sees another."""

    lengths: Tensor  # (D,)
    max_length: int
    total: int

    @classmethod
    def of(cls, lengths: Sequence[int] | Tensor, device: torch.device | str | None = None) -> Documents:
        """From the number of tokens in each document."""
        sizes = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
        if not sizes or min(sizes) < 1:
            raise ValueError("a packed row needs at least one document, and every document at least one token")
        return cls(torch.tensor(sizes, device=device), max(sizes), sum(sizes))

    @cached_property
    def starts(self) -> Tensor:
        """Where each document begins, and the end of the last: (D + 1,)."""
        return F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    @cached_property
    def index(self) -> Tensor:
        """The document each token belongs to: (N,)."""
        numbers = torch.arange(len(self.lengths), device=self.lengths.device)
        return numbers.repeat_interleave(self.lengths, output_size=self.total)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its document: (N,)."""
        return torch.arange(self.total, device=self.lengths.device) - self.starts[:-1].long()[self.index]

    def pad(self, x: Tensor) -> Tensor:
        """(1, H, N, E) packed to (D, H, longest, E), a row for each document, with zeros behind the shorter ones."""
        rows = x.new_zeros(len(self.lengths) * self.max_length, x.shape[1], x.shape[3])
        rows = rows.index_copy(0, self._slots, x[0].transpose(0, 1))
        return rows.unflatten(0, (-1, self.max_length)).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """(D, H, longest, E) back to (1, H, N, E)."""
        return x.transpose(1, 2).flatten(0, 1)[self._slots].transpose(0, 1)[None]

    @cached_property
    def _slots(self) -> Tensor:
        """Where each token lies when every document has a row of its own: (N,)."""
        return self.index * self.max_length + self.positions


class TreeMask(NamedTuple):
    """What each query may look at, written out, where one row holds several continuations; every query sees a key."""

    mask: Tensor  # (B, T, S)
    queries: Tensor  # (B, 1) the position of the queries
    keys: Tensor  # (B, S) the position of each key


@dataclass(frozen=True)
class Mask:
    """What each query may look at: the AND of everything that is set."""

    causal: bool = False  # nothing later than the query itself
    pattern: Pattern = FULL
    lengths: Tensor | None = None  # (B,) real keys at the front of each row; the rest is padding
    start: Tensor | int | None = None  # (B,) or for all, position of the first query among the keys; None: 0
    tree: TreeMask | None = None  # takes the place of causal, lengths and start
    documents: tuple[Documents, Documents] | None = None  # of the queries and of the keys, both packed

    def simplified(self, keys: int) -> Mask:
        """The same mask, as plain as it can be for a row of so many keys."""
        kind, size, _ = self.pattern
        if kind in ("window", "block") and size >= keys:
            return replace(self, pattern=FULL)
        if kind == "column" and size > keys:
            return replace(self, pattern=Pattern("column", max(1, keys)))
        return self

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Packed documents of one length that stand together: how many, and the queries and the keys of each."""
        assert self.documents is not None
        pairs = zip(*(documents.lengths.tolist() for documents in self.documents), strict=True)
        return [(len(list(run)), queries, keys) for (queries, keys), run in groupby(pairs) if queries or keys]

    @property
    def needs_padding_mask(self) -> bool:
        """Whether padding has to be hidden: behind a causal mask, no real query ever reaches it."""
        return self.lengths is not None and not self.causal

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """True where a query may look; broadcasts to (B, 1, T, S). None: everything may be seen."""
        if self.documents is not None:
            ours, theirs = self.documents
            same = (ours.index[:, None] == theirs.index)[None, None]  # (1, 1, N, N')
            other = self._allowed(ours.positions[None], theirs.positions)
            return same if other is None else same & other
        if self.tree is not None:
            visible, i, j = self.tree
            other = self.pattern.allows(i[:, None, :, None], j[:, None, None])
            return visible[:, None] if other is None else visible[:, None] & other
        i = torch.arange(queries, device=device)[None]  # (1, T)
        if self.start is not None:
            i = i + (self.start[:, None] if isinstance(self.start, Tensor) else self.start)  # (B or 1, T)
        return self.between(i, torch.arange(keys, device=device))

    def between(self, i: Tensor, j: Tensor) -> Tensor | None:
        """`dense` for queries at positions i (B or 1, T) and keys at positions j (S,)."""
        allowed = self._allowed(i, j)
        if self.lengths is None:
            return allowed
        real = (j < self.lengths[:, None])[:, None, None]  # (B, 1, 1, S)
        return real if allowed is None else real & allowed

    def _allowed(self, i: Tensor, j: Tensor) -> Tensor | None:
        i = i[:, None, :, None]  # (B or 1, 1, T, 1)
        allowed = self.pattern.allows(i, j)
        if not self.causal:
            return allowed
        return j <= i if allowed is None else allowed & (j <= i)
