"""KV caches: keys and values of earlier tokens, so that a step computes only the new ones.

B batch · G key-value heads · T new tokens · C slots · E head dim · S source tokens · K branches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.config import ModelConfig
from clearhead.ops.masks import Mask

FIRST_SLOTS = 32  # initial allocation; it doubles when full, so a large capacity costs nothing up front


@dataclass
class LayerKVCache:
    """Self-attention KV cache of one decoder layer, and the source keys and values once cross-attention has run."""

    keys: Tensor | None = None  # (B, G, C + 1, E); padding is written to the extra slot at the end
    values: Tensor | None = None
    slots: int = 0  # C
    slot_ids: slice | tuple[Tensor, Tensor] | None = None  # slots of this step: one slice, or row and slot ids (B, T)
    visible_slots: int = 0  # slots that this step attends to
    source: tuple[Tensor, Tensor] | None = None  # keys and values of the source, (B, G, S, E) each

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, G, T, E) of this step, detached; return all visible keys and values."""
        if self.keys is None or self.values is None:  # dtype and device are those of the first step
            self.keys, self.values = (x.new_zeros(*x.shape[:2], self.slots + 1, x.shape[3]) for x in (k, v))
        self.grow()
        for cached, new in ((self.keys, k.detach()), (self.values, v.detach())):
            if isinstance(self.slot_ids, slice):
                cached[:, :, self.slot_ids] = new
            elif self.slot_ids is not None:  # two index tensors put their axes first: (B, T, G, E)
                cached[self.slot_ids[0], :, self.slot_ids[1]] = new.transpose(1, 2)
        return self.read()

    def grow(self) -> None:
        """Allocate the slots that this step needs."""
        assert self.keys is not None
        assert self.values is not None
        if (missing := self.slots + 1 - self.keys.shape[2]) > 0:
            self.keys, self.values = (F.pad(x, (0, 0, 0, missing)) for x in (self.keys, self.values))

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values that this step attends to: (B, G, visible slots, E) each."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, : self.visible_slots], self.values[:, :, : self.visible_slots]


class KVCache:
    """KV cache of a batch whose rows may differ in length; memory grows with use, up to `capacity` tokens a row.

    `lengths` (B,) counts the tokens of each row; `max_length` bounds them on the host, so that no step waits for the
    device. As long as no row was padded, `uniform_lengths` is True: every row has length `max_length`, and a step needs
    no index tensors.
    """

    first_slots = FIRST_SLOTS

    def __init__(self, config: ModelConfig, rows: int, capacity: int):
        if capacity > config.max_positions:
            raise ValueError(
                f"capacity: {capacity} tokens is longer than max_positions {config.max_positions}; use a smaller cache"
            )
        self.config, self.capacity, self.max_length, self.slots, self.uniform_lengths = config, capacity, 0, 0, True
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.source_lengths: Tensor | None = None
        self.source: object = None  # the encoder output of the first step
        self.layers = [LayerKVCache() for _ in range(config.decoder_layers)]

    def __len__(self) -> int:
        return len(self.lengths)

    def begin(self, ids: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Mask]:
        """Make room for a step of ids (B, T); return its positions (B or 1, T) and its attention mask.

        `counts` (B,) is the number of tokens in each row of ids; the rest is padding and is not cached.
        """
        rows, tokens = ids.shape
        if rows != len(self):
            raise ValueError(f"cache: the cache has {len(self)} rows, ids have {rows}; make a cache for {rows} rows")
        self.lengths = self.lengths.to(ids.device)
        if self.max_length + tokens > self.capacity:
            self._check_capacity(tokens, counts)
        visible = min(self.max_length + tokens, self.capacity)
        self._reserve(visible)
        steps = torch.arange(tokens, device=ids.device)
        if self.uniform_lengths and counts is None:
            self._assign_slots(slice(self.max_length, visible), visible)
            return steps[None] + self.max_length, Mask(causal=True, start=self.max_length or None)
        positions = slot_ids = self.lengths[:, None] + steps  # (B, T)
        if counts is not None:  # padding may reach beyond the capacity: it goes to the extra slot
            slot_ids = torch.where(steps < counts[:, None], positions, self.slots)
            positions = positions.clamp(max=self.capacity - 1)
        self._assign_slots((torch.arange(rows, device=ids.device)[:, None], slot_ids), visible)
        if self.max_length == 0:  # first step: queries and keys are at the same positions
            return steps[None].clamp(max=self.capacity - 1), Mask(causal=True, lengths=counts)
        return positions, Mask(causal=True, start=self.lengths)

    def _check_capacity(self, tokens: int, counts: Tensor | None) -> None:
        """Tighten `max_length` to the true lengths, and raise if the step still does not fit."""
        self.max_length = int(self.lengths.max())
        needed = int((self.lengths + (tokens if counts is None else counts)).max())
        if needed > self.capacity:
            raise ValueError(
                f"capacity: the cache holds {self.capacity} tokens a row, {needed} are needed; use a larger capacity"
            )

    def _reserve(self, slots: int) -> None:
        if slots > self.slots:
            self.slots = min(self.capacity, max(slots, 2 * self.slots, self.first_slots))

    def _assign_slots(self, slot_ids: slice | tuple[Tensor, Tensor], visible: int) -> None:
        for layer in self.layers:
            layer.slots, layer.slot_ids, layer.visible_slots = self.slots, slot_ids, visible

    def advance(self, tokens: int, counts: Tensor | None = None) -> None:
        """End a step: every row grows by its count, or by `tokens`."""
        self.lengths = self.lengths + (tokens if counts is None else counts.clamp(0, tokens))
        self.max_length = min(self.max_length + tokens, self.capacity)
        self.uniform_lengths = self.uniform_lengths and counts is None

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each row to its length (rejected draft tokens)."""
        self.lengths = torch.tensor(lengths, device=self.lengths.device)
        self.max_length, self.uniform_lengths = max(lengths), len(set(lengths)) == 1

    def select(self, rows: Tensor, tighten: bool = False) -> None:
        """Keep, repeat, reorder or drop rows: row n becomes the old row rows[n].

        `tighten` recomputes `max_length`, so that slots of dropped rows are not read again; it waits for the device.
        """
        self._index_rows(rows)
        if tighten and not self.uniform_lengths and len(self):
            self.rewind(self.lengths.tolist())

    def _index_rows(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]
        if self.source_lengths is not None:
            self.source_lengths = self.source_lengths[rows]
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            if layer.source is not None:
                layer.source = (layer.source[0][rows], layer.source[1][rows])
