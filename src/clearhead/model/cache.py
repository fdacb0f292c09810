"""Keys and values of what was already read, so that each step computes new tokens alone.

B rows · G key-value heads · T new tokens · C capacity · E head width · S source tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.model.masks import Mask


@dataclass
class LayerCache:
    """One decoder layer's share: its own keys and values, and those of the source once they are known."""

    capacity: int
    keys: Tensor | None = None  # (B, G, C + 1, E); the slot behind the last takes what padding writes
    values: Tensor | None = None
    slots: tuple[Tensor, Tensor] | None = None  # rows (B, 1) and places (B, T) where this step's tokens go
    readable: int = 0  # how many slots this step looks at
    source: tuple[Tensor, Tensor] | None = None  # (B, G, S, E) each

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put this step's k and v (B, G, T, E) in place; returns all keys and values up to here, without gradient."""
        if self.keys is None or self.values is None:  # the first step says in which dtype and on which device
            shape = (k.shape[0], k.shape[1], self.capacity + 1, k.shape[3])
            self.keys, self.values = (torch.zeros(shape, dtype=x.dtype, device=x.device) for x in (k, v))
        assert self.slots is not None
        rows, places = self.slots
        self.keys[rows, :, places] = k.detach().transpose(1, 2)  # an index on two axes puts them first: (B, T, G, E)
        self.values[rows, :, places] = v.detach().transpose(1, 2)
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """The keys and values that this step looks at: (B, G, readable, E) each."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, : self.readable], self.values[:, :, : self.readable]


class Cache:
    """Preallocated keys and values of a batch of rows, each row as long as it is.

    `lengths` (B,) counts the tokens of each row; `longest` bounds them on the host, so that no step waits for the GPU.
    """

    def __init__(self, config: ModelConfig, rows: int, capacity: int):
        if capacity > config.max_positions:
            raise ValueError(f"a cache of {capacity} tokens is longer than max_positions {config.max_positions}")
        self.config, self.capacity, self.longest = config, capacity, 0
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.source_lengths: Tensor | None = None
        self.source: object = None  # what the first step has encoded
        self.layers = [LayerCache(capacity) for _ in range(config.decoder_layers)]

    def __len__(self) -> int:
        return len(self.lengths)

    def begin(self, ids: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Mask]:
        """Make room for a step of ids (B, T); returns their positions (B or 1, T) and the mask they attend by.

        `counts` (B,) says how many of them are real in each row; the rest is padding and leaves no trace.
        """
        rows, tokens = ids.shape
        if rows != len(self):
            raise ValueError(f"the cache has {len(self)} rows, ids have {rows}")
        self.lengths = self.lengths.to(ids.device)
        if self.longest + tokens > self.capacity:
            self._look_closer(tokens, counts)
        steps = torch.arange(tokens, device=ids.device)
        positions = places = self.lengths[:, None] + steps  # (B, T)
        if counts is not None:  # padding may run past the end, and must not overwrite what is there
            places = torch.where(steps < counts[:, None], positions, self.capacity)
            positions = positions.clamp(max=self.capacity - 1)
        numbers = torch.arange(rows, device=ids.device)[:, None]
        for layer in self.layers:
            layer.slots, layer.readable = (numbers, places), min(self.longest + tokens, self.capacity)
        if self.longest == 0:  # nothing before: queries and keys are the same positions
            return steps[None].clamp(max=self.capacity - 1), Mask(causal=True, lengths=counts)
        return positions, Mask(causal=True, start=self.lengths)

    def _look_closer(self, tokens: int, counts: Tensor | None) -> None:
        """The bound says that a step may not fit: ask for the true lengths, and refuse if it does not."""
        self.longest = int(self.lengths.max())
        needed = int((self.lengths + (tokens if counts is None else counts)).max())
        if needed > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens a row, {needed} are needed; make it larger")

    def advance(self, tokens: int, counts: Tensor | None = None) -> None:
        """The step is done: every row is longer by its count, or by `tokens`."""
        self.lengths = self.lengths + (tokens if counts is None else counts.clamp(0, tokens))
        self.longest = min(self.longest + tokens, self.capacity)

    def select(self, rows: Tensor) -> None:
        """Keep, repeat, reorder or drop rows: row n becomes what row rows[n] was (beams, finished sentences)."""
        self.lengths = self.lengths[rows]
        if self.source_lengths is not None:
            self.source_lengths = self.source_lengths[rows]
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            if layer.source is not None:
                layer.source = (layer.source[0][rows], layer.source[1][rows])
