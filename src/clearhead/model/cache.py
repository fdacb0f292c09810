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

    keys: Tensor  # (B, G, C + 1, E); the slot behind the last takes what padding writes
    values: Tensor
    slots: tuple[Tensor, Tensor]  # rows (B, 1) and places (B, T) where this step's tokens go
    readable: int  # how many slots this step looks at
    source: tuple[Tensor, Tensor] | None = None  # (B, G, S, E) each

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put this step's k and v (B, G, T, E) in place; returns all keys and values up to here, without gradient."""
        rows, places = self.slots
        self.keys[rows, :, places] = k.detach().transpose(1, 2)  # an index on two axes puts them first: (B, T, G, E)
        self.values[rows, :, places] = v.detach().transpose(1, 2)
        return self.keys[:, :, : self.readable], self.values[:, :, : self.readable]


class Cache:
    """Preallocated keys and values of a batch of rows, each row as long as it is.

    `lengths` (B,) counts the tokens of each row; `longest` bounds them on the host, so that no step waits for the GPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        if capacity > config.max_positions:
            raise ValueError(f"a cache of {capacity} tokens is longer than max_positions {config.max_positions}")
        shape = (rows, config.kv_heads, capacity + 1, config.head_width)
        self.capacity, self.longest = capacity, 0
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.source_lengths: Tensor | None = None
        nowhere = torch.zeros(rows, 0, dtype=torch.long, device=device)
        self.layers = [
            LayerCache(
                torch.zeros(shape, device=device, dtype=dtype),
                torch.zeros(shape, device=device, dtype=dtype),
                slots=(nowhere, nowhere),
                readable=0,
            )
            for _ in range(config.decoder_layers)
        ]

    def __len__(self) -> int:
        return len(self.lengths)

    def begin(self, tokens: int, counts: Tensor | None = None) -> tuple[Tensor, Mask]:
        """Make room for a step of `tokens` more; returns their positions (B or 1, T) and the mask they attend by.

        `counts` (B,) says how many of them are real in each row; the rest is padding and leaves no trace.
        """
        if self.longest + tokens > self.capacity:
            self._look_closer(tokens, counts)
        steps = torch.arange(tokens, device=self.lengths.device)
        positions = places = self.lengths[:, None] + steps  # (B, T)
        if counts is not None:  # padding may run past the end, and must not overwrite what is there
            places = torch.where(steps < counts[:, None], positions, self.capacity)
            positions = positions.clamp(max=self.capacity - 1)
        rows = torch.arange(len(self), device=self.lengths.device)[:, None]
        for layer in self.layers:
            layer.slots, layer.readable = (rows, places), min(self.longest + tokens, self.capacity)
        if self.longest == 0:  # nothing before: queries and keys are the same positions
            return steps[None].clamp(max=self.capacity - 1), Mask(causal=True, lengths=counts)
        return positions, Mask(causal=True, start=self.lengths)

    def _look_closer(self, tokens: int, counts: Tensor | None) -> None:
        """The bound says that a step may not fit: ask for the true lengths, and refuse if it does not."""
        self.longest = int(self.lengths.max())
        needed = int((self.lengths + (tokens if counts is None else counts)).max())
        if needed > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens a row, {needed} are needed; give it more capacity"
            )

    def advance(self, tokens: int, counts: Tensor | None = None) -> None:
        """The step is done: every row is longer by its count, or by `tokens`."""
        self.lengths = self.lengths + (tokens if counts is None else counts)
        self.longest = min(self.longest + tokens, self.capacity)

    def select(self, rows: Tensor) -> None:
        """Keep, repeat, reorder or drop rows: row n becomes what row rows[n] was (beams, finished sentences)."""
        self.lengths = self.lengths[rows]
        if self.source_lengths is not None:
            self.source_lengths = self.source_lengths[rows]
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            if layer.source is not None:
                layer.source = (layer.source[0][rows], layer.source[1][rows])
