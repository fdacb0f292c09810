"""What the model is given at once: tensors by name, padded or packed, and how many real tokens there are.

B samples · T tokens of the longest · N tokens of all samples together
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from clearhead.data.store import ranges
from clearhead.ops.cross_entropy import IGNORED
from clearhead.ops.masks import Documents

TOKENS, DOCUMENTS = 256, 256  # `rounded` packed rows have multiples of these


@dataclass(frozen=True)
class Ragged:
    """Values of many rows, one row after the other, and how long each is."""

    values: NDArray[Any]  # (N,)
    lengths: NDArray[np.int64]  # (B,)

    def arrange(self, packed: bool, fill: int = 0) -> Tensor:
        """(1, N) packed, or (B, T) with `fill` behind the shorter rows."""
        kind = np.float32 if self.values.dtype.kind == "f" else np.int64
        if packed:
            return torch.from_numpy(self.values.astype(kind))[None]
        max_length = int(self.lengths.max(initial=0))
        table = np.full(len(self.lengths) * max_length, fill, kind)
        table[ranges(np.arange(len(self.lengths)) * max_length, self.lengths)] = self.values
        return torch.from_numpy(table.reshape(-1, max_length))


@dataclass(frozen=True)
class Batch:
    """Tensors by name. Where rows are packed, `documents` says how long each is; else NAME_lengths does.

    translation   source (B, S), target and labels (B, T): the target begins with `begin`, its labels end with `end`
    language      ids and labels (B, T)
    masked        ids, segments and labels (B, T); next_sentence (B,)
    labeled      ids and segments (B, T); labels (B,) for a row, (B, T) for tags
    answering     the same with first_token and last_token (B,)
    similarity    first and second (B, T), labels (B,)
    """

    tensors: dict[str, Tensor]
    tokens: int  # real ones, of every side
    documents: dict[str, Documents] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        """A tensor that some batches have."""
        return self.tensors.get(name)

    @property
    def size(self) -> int:
        """Tokens that the model computes, padding included."""
        sides = ("source", "target") if "source" in self.tensors else ("ids", "first", "second")
        return sum(self.tensors[side].numel() for side in sides if side in self.tensors and self.tensors[side].ndim > 1)

    def to(self, device: torch.device | str) -> Batch:
        """The same on a device; from pinned memory without waiting."""
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}
        documents = {
            name: replace(found, lengths=found.lengths.to(device, non_blocking=True))
            for name, found in self.documents.items()
        }
        return replace(self, tensors=tensors, documents=documents)

    def pin(self) -> Batch:
        """The same in memory that a GPU can fetch by itself."""
        tensors = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        documents = {name: replace(found, lengths=found.lengths.pin_memory()) for name, found in self.documents.items()}
        return replace(self, tensors=tensors, documents=documents)

    def rounded(self, most: int) -> Batch:
        """The same packed rows, a little longer, so that many batches have one shape: what is recorded can be replayed.

        Behind the documents stand some that nobody asks for, and empty ones; none is longer than `most`.
        """
        tensors, documents = dict(self.tensors), {}
        max_length = {side: min(most, -(-found.max_length // 128) * 128) for side, found in self.documents.items()}
        added = {side: 8 + -(found.total + 8) % TOKENS for side, found in self.documents.items()}  # at least 8
        full = max(-(-added[side] // max_length[side]) for side in added)  # so many documents hold them
        for side, found in self.documents.items():
            count = -(-(len(found.lengths) + full) // DOCUMENTS) * DOCUMENTS
            sizes = torch.zeros(count, dtype=torch.long)
            sizes[: len(found.lengths)] = found.lengths
            behind = torch.full((full,), added[side] // full)
            behind[: added[side] % full] += 1
            sizes[len(found.lengths) : len(found.lengths) + full] = behind
            documents[side] = Documents(sizes, max_length[side], found.total + added[side])
            for name in ("target", "labels") if side == "target" else (side, "labels") if side == "ids" else (side,):
                tensors[name] = F.pad(tensors[name], (0, added[side]), value=IGNORED if name == "labels" else 0)
        return replace(self, tensors=tensors, documents=documents)

    @property
    def shape(self) -> tuple[object, ...]:
        """All that decides which kernels work on it."""
        rows = ((side, len(found.lengths), found.max_length, found.total) for side, found in self.documents.items())
        return (*((name, *tensor.shape) for name, tensor in self.tensors.items()), *rows)

    def ignored(self) -> Batch:
        """The same with no label that counts, for a process that has nothing to do in this step."""
        unlabeled = ("labels", "next_sentence", "first_token", "last_token")
        tensors = {
            name: torch.full_like(tensor, IGNORED) if name in unlabeled else tensor
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors, tokens=0)


def arrange(
    sides: Mapping[str, Mapping[str, NDArray[Any]]],
    lengths: Mapping[str, NDArray[np.int64]],
    packed: bool,
    padding: Mapping[str, int],
    others: Mapping[str, NDArray[Any]] | None = None,
) -> Batch:
    """A batch of sides (source, target …), each with fields (N,) of the same lengths: {side: {field: values}}.

    `padding` says what stands behind shorter rows of a field, where it is not 0; `others` has a value for each row.
    """
    tensors: dict[str, Tensor] = {}
    documents: dict[str, Documents] = {}
    for side, fields in sides.items():
        for name, values in fields.items():
            tensors[name] = Ragged(values, lengths[side]).arrange(packed, padding.get(name, 0))
        if packed:
            documents[side] = Documents.of(lengths[side].tolist())
        else:
            tensors[f"{side}_lengths"] = torch.from_numpy(lengths[side])
    for name, values in (others or {}).items():
        tensors[name] = torch.from_numpy(values)
    return Batch(tensors, int(sum(each.sum() for each in lengths.values())), documents)


def together(batches: list[Batch], padding: Mapping[str, int]) -> Batch:
    """One batch of several, in turn."""
    if len(batches) == 1:
        return batches[0]
    tensors = {}
    for name in batches[0].tensors:
        parts = [batch.tensors[name] for batch in batches]
        if parts[0].ndim == 2 and not batches[0].documents:
            widest = max(part.shape[1] for part in parts)
            parts = [F.pad(part, (0, widest - part.shape[1]), value=padding.get(name, 0)) for part in parts]
        tensors[name] = torch.cat(parts, dim=1 if batches[0].documents and parts[0].ndim == 2 else 0)
    documents = {
        name: Documents.of(torch.cat([batch.documents[name].lengths for batch in batches]))
        for name in batches[0].documents
    }
    return Batch(tensors, sum(batch.tokens for batch in batches), documents)
