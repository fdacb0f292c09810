"""Batch: tensors by name, padded or packed.

B samples · T tokens of the longest sample · N tokens of all samples
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

from clearhead.data.token_store import concat_ranges
from clearhead.ops.cross_entropy import IGNORED
from clearhead.ops.masks import Documents

TOKEN_MULTIPLE, DOCUMENT_MULTIPLE = 256, 256  # sizes that `Batch.pad_to_bucket` rounds up to


@dataclass(frozen=True)
class RaggedArray:
    """Rows of different lengths, concatenated."""

    values: NDArray[Any]  # (N,)
    lengths: NDArray[np.int64]  # (B,)

    def to_tensor(self, packed: bool, pad_value: int = 0) -> Tensor:
        """Return (1, N) packed, or (B, T) padded with `pad_value`."""
        dtype = np.float32 if self.values.dtype.kind == "f" else np.int64
        if packed:
            return torch.from_numpy(self.values.astype(dtype))[None]
        max_length = int(self.lengths.max(initial=0))
        table = np.full(len(self.lengths) * max_length, pad_value, dtype)
        table[concat_ranges(np.arange(len(self.lengths)) * max_length, self.lengths)] = self.values
        return torch.from_numpy(table.reshape(-1, max_length))


@dataclass(frozen=True)
class Batch:
    """Tensors by name. Packed batches have sample lengths in `documents`, padded ones in tensors NAME_lengths (B,).

    translation              source (B, S); target and labels (B, T), shifted by one
    language-model           ids and labels (B, T)
    masked-language-model    ids, segments and labels (B, T); next_sentence (B,)
    classification, tagging  ids and segments (B, T); labels (B,) for classes and scores, (B, T) for tags
    answering                ids and segments (B, T); first_token and last_token (B,)
    similarity               first and second (B, T); labels (B,)
    """

    tensors: dict[str, Tensor]
    num_tokens: int  # of all sides, without padding
    documents: dict[str, Documents] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        """Return a tensor, or None if this batch does not have it."""
        return self.tensors.get(name)

    @property
    def padded_tokens(self) -> int:
        """Number of tokens processed by the model, padding included."""
        sides = ("source", "target") if "source" in self.tensors else ("ids", "first", "second")
        return sum(self.tensors[side].numel() for side in sides if side in self.tensors and self.tensors[side].ndim > 1)

    def to(self, device: torch.device | str) -> Batch:
        """Copy to a device; asynchronous from pinned memory."""
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}
        documents = {
            side: replace(docs, lengths=docs.lengths.to(device, non_blocking=True))
            for side, docs in self.documents.items()
        }
        return replace(self, tensors=tensors, documents=documents)

    def pin_memory(self) -> Batch:
        """Copy to pinned memory."""
        tensors = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        documents = {side: replace(docs, lengths=docs.lengths.pin_memory()) for side, docs in self.documents.items()}
        return replace(self, tensors=tensors, documents=documents)

    def pad_to_bucket(self, max_length: int) -> Batch:
        """Pad a packed batch to a bucketed shape, so that CUDA graphs captured for one batch fit many.

        Appends documents of padding, none longer than `max_length`, and empty ones; their labels are ignored.
        """
        tensors, documents = dict(self.tensors), {}
        max_lengths = {side: min(max_length, -(-docs.max_length // 128) * 128) for side, docs in self.documents.items()}
        added = {side: 8 + -(docs.total + 8) % TOKEN_MULTIPLE for side, docs in self.documents.items()}  # at least 8
        padding_docs = max(-(-added[side] // max_lengths[side]) for side in added)
        for side, docs in self.documents.items():
            num_docs = len(docs.lengths)
            count = -(-(num_docs + padding_docs) // DOCUMENT_MULTIPLE) * DOCUMENT_MULTIPLE
            padding_lengths = torch.full((padding_docs,), added[side] // padding_docs)
            padding_lengths[: added[side] % padding_docs] += 1
            lengths = torch.zeros(count, dtype=torch.long)
            lengths[:num_docs] = docs.lengths
            lengths[num_docs : num_docs + padding_docs] = padding_lengths
            documents[side] = Documents(lengths, max_lengths[side], docs.total + added[side])
            for name in ("target", "labels") if side == "target" else (side, "labels") if side == "ids" else (side,):
                tensors[name] = F.pad(tensors[name], (0, added[side]), value=IGNORED if name == "labels" else 0)
        return replace(self, tensors=tensors, documents=documents)

    @property
    def shape_key(self) -> tuple[object, ...]:
        """All sizes that kernels depend on: the key of captured CUDA graphs."""
        packed = ((side, len(docs.lengths), docs.max_length, docs.total) for side, docs in self.documents.items())
        return (*((name, *tensor.shape) for name, tensor in self.tensors.items()), *packed)

    def without_labels(self) -> Batch:
        """Ignore all labels: a batch for a process without samples in this step."""
        label_names = ("labels", "next_sentence", "first_token", "last_token")
        tensors = {
            name: torch.full_like(tensor, IGNORED) if name in label_names else tensor
            for name, tensor in self.tensors.items()
        }
        return Batch(tensors, 0, self.documents)


def collate(
    sides: Mapping[str, Mapping[str, NDArray[Any]]],
    lengths: Mapping[str, NDArray[np.int64]],
    packed: bool,
    pad_values: Mapping[str, int],
    per_row: Mapping[str, NDArray[Any]] | None = None,
) -> Batch:
    """Collate sides (source, target …), each with fields (N,) of the same row lengths: {side: {field: values}}.

    `pad_values` has the padding of a field if it is not 0; `per_row` has fields with one value per row.
    """
    tensors: dict[str, Tensor] = {}
    documents: dict[str, Documents] = {}
    for side, fields in sides.items():
        for name, values in fields.items():
            tensors[name] = RaggedArray(values, lengths[side]).to_tensor(packed, pad_values.get(name, 0))
        if packed:
            documents[side] = Documents.from_lengths(lengths[side].tolist())
        else:
            tensors[f"{side}_lengths"] = torch.from_numpy(lengths[side])
    for name, values in (per_row or {}).items():
        tensors[name] = torch.from_numpy(values)
    return Batch(tensors, int(sum(each.sum() for each in lengths.values())), documents)


def concat_batches(batches: list[Batch], pad_values: Mapping[str, int]) -> Batch:
    """Concatenate the samples of batches."""
    if len(batches) == 1:
        return batches[0]
    tensors = {}
    for name in batches[0].tensors:
        parts = [batch.tensors[name] for batch in batches]
        if parts[0].ndim == 2 and not batches[0].documents:
            max_length = max(part.shape[1] for part in parts)
            parts = [F.pad(part, (0, max_length - part.shape[1]), value=pad_values.get(name, 0)) for part in parts]
        tensors[name] = torch.cat(parts, dim=1 if batches[0].documents and parts[0].ndim == 2 else 0)
    documents = {
        side: Documents.from_lengths(torch.cat([batch.documents[side].lengths for batch in batches]))
        for side in batches[0].documents
    }
    return Batch(tensors, sum(batch.num_tokens for batch in batches), documents)
