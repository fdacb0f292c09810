"""Attention masks as values: which keys each query attends to.

B batch · T queries · S keys · N tokens of a packed row · D documents

`Mask.dense` gives the boolean table; backends read the fields instead, to exploit the structure.
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
    """The sparsity pattern of a layer, for a query at position i and a key at position j.

    full      all keys
    window    the nearest keys: |i - j| < size
    column    every size-th key: (i - j) mod size = 0
    block     the same block: ⌊i / size⌋ = ⌊j / size⌋
    summary   the last `summary` positions of each block: j mod size ≥ size - summary

    Sparse Transformers (Child et al. 2019) calls window and column together "strided", block and summary "fixed".
    """

    kind: Literal["full", "window", "column", "block", "summary"] = "full"
    size: int = 0
    summary: int = 0

    def allows(self, i: Tensor, j: Tensor) -> Tensor | None:
        """Return whether position i attends to position j, broadcasting the two; None means everywhere."""
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
    """Return the pattern of each layer: `config.attention` cycles; strided and fixed alternate their two patterns."""
    stride = config.stride or 0
    parts = {
        "full": [FULL],
        "window": [Pattern("window", config.window or 0)],
        "strided": [Pattern("window", stride + 1), Pattern("column", stride)],
        "fixed": [Pattern("block", stride), Pattern("summary", stride, config.summary or 0)],
    }
    result, counts = [], dict.fromkeys(parts, 0)
    for layer in range(layers):
        name = config.attention[layer % len(config.attention)]
        result.append(parts[name][counts[name] % len(parts[name])])
        counts[name] += 1
    return result


@dataclass(frozen=True)
class Documents:
    """The documents of one packed row of N tokens, without padding; attention never crosses documents."""

    lengths: Tensor  # (D,)
    max_length: int
    total: int  # N

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor, device: torch.device | str | None = None) -> Documents:
        """Make documents from the number of tokens in each."""
        sizes = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
        if not sizes or min(sizes) < 1:
            raise ValueError(
                "documents: a packed row needs at least one document, and every document at least one token"
            )
        return cls(torch.tensor(sizes, device=device), max(sizes), sum(sizes))

    @cached_property
    def starts(self) -> Tensor:
        """Cumulative lengths, the `cu_seqlens` of flash attention: (D + 1,)."""
        return F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    @cached_property
    def index(self) -> Tensor:
        """The document that each token belongs to: (N,)."""
        ids = torch.arange(len(self.lengths), device=self.lengths.device)
        return ids.repeat_interleave(self.lengths, output_size=self.total)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its document: (N,)."""
        return torch.arange(self.total, device=self.lengths.device) - self.starts[:-1].long()[self.index]

    def pad(self, x: Tensor) -> Tensor:
        """Unpack (1, H, N, E) to a row for each document, zero-padded: (D, H, max_length, E)."""
        rows = x.new_zeros(len(self.lengths) * self.max_length, x.shape[1], x.shape[3])  # (D · max_length, H, E)
        rows = rows.index_copy(0, self._padded_index, x[0].transpose(0, 1))
        return rows.unflatten(0, (-1, self.max_length)).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """Pack (D, H, max_length, E) back to (1, H, N, E)."""
        return x.transpose(1, 2).flatten(0, 1)[self._padded_index].transpose(0, 1)[None]

    @cached_property
    def _padded_index(self) -> Tensor:
        """The index of each token in the padded rows, flattened: (N,)."""
        return self.index * self.max_length + self.positions


@dataclass(frozen=True)
class Mask:
    """Which keys each query attends to: the conjunction of all fields that are set."""

    causal: bool = False  # no key later than the query
    pattern: Pattern = FULL
    lengths: Tensor | None = None  # (B,), the keys of each row before its padding
    start: Tensor | int | None = None  # position of the first query among the keys, (B,) or for all rows; None is 0
    documents: tuple[Documents, Documents] | None = None  # packed queries and packed keys

    def simplified(self, keys: int) -> Mask:
        """Return an equal mask for rows of `keys` keys, with a simpler pattern if the size exceeds the row."""
        kind, size, _ = self.pattern
        if kind in ("window", "block") and size >= keys:
            return replace(self, pattern=FULL)
        if kind == "column" and size > keys:
            return replace(self, pattern=Pattern("column", max(1, keys)))
        return self

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs of neighboring documents of equal length: (documents, queries of each, keys of each)."""
        assert self.documents is not None
        pairs = zip(*(documents.lengths.tolist() for documents in self.documents), strict=True)
        return [(len(list(run)), queries, keys) for (queries, keys), run in groupby(pairs) if queries or keys]

    @property
    def needs_padding_mask(self) -> bool:
        """Whether padding must be masked; in a causal mask, it comes after every non-padding query."""
        return self.lengths is not None and not self.causal

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return booleans that broadcast to (B, 1, T, S), True where attention is allowed; None means everywhere."""
        if self.documents is not None:
            query_documents, key_documents = self.documents
            same = (query_documents.index[:, None] == key_documents.index)[None, None]  # (1, 1, N, N')
            mask = self._positional(query_documents.positions[None], key_documents.positions)
            return same if mask is None else same & mask
        i = torch.arange(queries, device=device)[None]  # (1, T)
        if self.start is not None:
            i = i + (self.start[:, None] if isinstance(self.start, Tensor) else self.start)  # (B or 1, T)
        return self.between(i, torch.arange(keys, device=device))

    def between(self, i: Tensor, j: Tensor) -> Tensor | None:
        """Return the dense mask for queries at positions i (B or 1, T) and keys at positions j (S,)."""
        mask = self._positional(i, j)
        if self.lengths is None:
            return mask
        padding_mask = (j < self.lengths[:, None])[:, None, None]  # (B, 1, 1, S)
        return padding_mask if mask is None else padding_mask & mask

    def _positional(self, i: Tensor, j: Tensor) -> Tensor | None:
        """Return the causal and pattern parts of the mask, which depend on positions only."""
        i = i[:, None, :, None]  # (B or 1, 1, T, 1)
        mask = self.pattern.allows(i, j)
        if not self.causal:
            return mask
        return j <= i if mask is None else mask & (j <= i)
