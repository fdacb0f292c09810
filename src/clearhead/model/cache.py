"""Keys and values of what was already read, so that each step computes new tokens alone.

B rows · G key-value heads · T new tokens · C slots · E head width · S source tokens · K branches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.config import ModelConfig
from clearhead.ops.masks import Mask, TreeMask

FIRST_SLOTS = 32  # what a cache begins with; it doubles when full, so that a generous capacity costs nothing


@dataclass
class LayerKVCache:
    """One decoder layer's share: its own keys and values, and those of the source once they are known."""

    keys: Tensor | None = None  # (B, G, C + 1, E); the slot behind the last takes what padding writes
    values: Tensor | None = None
    slots: int = 0  # C
    slot_ids: slice | tuple[Tensor, Tensor] | None = (
        None  # this step's slots: the same for all, or rows and slots (B, T)
    )
    visible_slots: int = 0  # how many slots this step looks at
    source: tuple[Tensor, Tensor] | None = None  # (B, G, S, E) each

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put this step's k and v (B, G, T, E) in place; returns all keys and values up to here, without gradient."""
        if self.keys is None or self.values is None:  # the first step says in which dtype and on which device
            self.keys, self.values = (x.new_zeros(*x.shape[:2], self.slots + 1, x.shape[3]) for x in (k, v))
        self.grow()
        for held, new in ((self.keys, k.detach()), (self.values, v.detach())):
            if isinstance(self.slot_ids, slice):
                held[:, :, self.slot_ids] = new
            elif self.slot_ids is not None:  # an index on two axes puts them first: (B, T, G, E)
                held[self.slot_ids[0], :, self.slot_ids[1]] = new.transpose(1, 2)
        return self.read()

    def grow(self) -> None:
        """Let there be slots for what this step brings."""
        assert self.keys is not None
        assert self.values is not None
        if (more := self.slots + 1 - self.keys.shape[2]) > 0:
            self.keys, self.values = (F.pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))

    def read(self) -> tuple[Tensor, Tensor]:
        """The keys and values that this step looks at: (B, G, readable, E) each."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, : self.visible_slots], self.values[:, :, : self.visible_slots]


class KVCache:
    """Keys and values of a batch of rows, each row as long as it is; memory grows with use, up to `capacity` tokens.

    `lengths` (B,) counts the tokens of each row; `longest` bounds them on the host, so that no step waits for the GPU.
    While no row was padded, all are `even`: `longest` is then their length, and steps go without tables.
    """

    first_slots = FIRST_SLOTS

    def __init__(self, config: ModelConfig, rows: int, capacity: int):
        if capacity > config.max_positions:
            raise ValueError(f"a cache of {capacity} tokens is longer than max_positions {config.max_positions}")
        self.config, self.capacity, self.max_length, self.slots, self.uniform_lengths = config, capacity, 0, 0, True
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.source_lengths: Tensor | None = None
        self.source: object = None  # what the first step has encoded
        self.layers = [LayerKVCache() for _ in range(config.decoder_layers)]

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
        if self.max_length + tokens > self.capacity:
            self._look_closer(tokens, counts)
        readable = min(self.max_length + tokens, self.capacity)
        self._grow(readable)
        steps = torch.arange(tokens, device=ids.device)
        if self.uniform_lengths and counts is None:
            self._place(slice(self.max_length, readable), readable)
            return steps[None] + self.max_length, Mask(causal=True, start=self.max_length or None)
        positions = places = self.lengths[:, None] + steps  # (B, T)
        if counts is not None:  # padding may run past the end, and must not overwrite what is there
            places = torch.where(steps < counts[:, None], positions, self.slots)
            positions = positions.clamp(max=self.capacity - 1)
        self._place((torch.arange(rows, device=ids.device)[:, None], places), readable)
        if self.max_length == 0:  # nothing before: queries and keys are the same positions
            return steps[None].clamp(max=self.capacity - 1), Mask(causal=True, lengths=counts)
        return positions, Mask(causal=True, start=self.lengths)

    def _look_closer(self, tokens: int, counts: Tensor | None) -> None:
        """The bound says that a step may not fit: ask for the true lengths, and refuse if it does not."""
        self.max_length = int(self.lengths.max())
        needed = int((self.lengths + (tokens if counts is None else counts)).max())
        if needed > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens a row, {needed} are needed; make it larger")

    def _grow(self, needed: int) -> None:
        if needed > self.slots:
            self.slots = min(self.capacity, max(needed, 2 * self.slots, self.first_slots))

    def _place(self, places: slice | tuple[Tensor, Tensor], readable: int) -> None:
        for layer in self.layers:
            layer.slots, layer.slot_ids, layer.visible_slots = self.slots, places, readable

    def advance(self, tokens: int, counts: Tensor | None = None) -> None:
        """The step is done: every row is longer by its count, or by `tokens`."""
        self.lengths = self.lengths + (tokens if counts is None else counts.clamp(0, tokens))
        self.max_length = min(self.max_length + tokens, self.capacity)
        self.uniform_lengths = self.uniform_lengths and counts is None

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget what each row holds beyond so many tokens (guesses that were wrong)."""
        self.lengths = torch.tensor(lengths, device=self.lengths.device)
        self.max_length, self.uniform_lengths = max(lengths), len(set(lengths)) == 1

    def select(self, rows: Tensor) -> None:
        """Keep, repeat, reorder or drop rows: row n becomes what row rows[n] was (samples, finished sentences)."""
        self._take(rows)
        if (
            not self.uniform_lengths and self.lengths.is_cpu and len(self)
        ):  # what longer rows have left need not be read again
            self.rewind(self.lengths.tolist())

    def _take(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]
        if self.source_lengths is not None:
            self.source_lengths = self.source_lengths[rows]
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            if layer.source is not None:
                layer.source = (layer.source[0][rows], layer.source[1][rows])

    def concat(self, other: KVCache, capacity: int) -> None:
        """The rows of another cache of this network come behind our own; from here on a row holds up to `capacity`.

        Slots that nothing is in are not taken along, so that memory shrinks again after a long row.
        """
        self.uniform_lengths = self.uniform_lengths and other.uniform_lengths and self.max_length == other.max_length
        self.max_length, self.capacity = max(self.max_length, other.max_length), capacity
        self.slots = min(capacity, (self.max_length // FIRST_SLOTS + 1) * FIRST_SLOTS)
        if self.source is not None:
            self.source = ()  # several from now on; none of them is kept but as keys and values
            self.source_lengths = torch.cat([self._sizes_of_sources(), other._sizes_of_sources()])
        for layer, new in zip(self.layers, other.layers, strict=True):
            assert layer.keys is not None and layer.values is not None  # noqa: PT018
            assert new.keys is not None and new.values is not None  # noqa: PT018
            layer.keys = _below(layer.keys, new.keys, self.slots + 1)
            layer.values = _below(layer.values, new.values, self.slots + 1)
            if self.source_lengths is not None and layer.source is not None and new.source is not None:
                dim = int(self.source_lengths.max())
                layer.source = tuple(_below(a, b, dim) for a, b in zip(layer.source, new.source, strict=True))  # type: ignore[assignment]
        self.lengths = torch.cat([self.lengths, other.lengths])

    def _sizes_of_sources(self) -> Tensor:
        if self.source_lengths is not None:
            return self.source_lengths
        assert self.layers[0].source is not None
        return torch.full_like(self.lengths, self.layers[0].source[0].shape[2])

    def drop_row(self, row: int) -> None:
        """One row leaves, and the last takes its place: nothing else is moved."""
        self.lengths = _without(self.lengths, row)
        if self.source_lengths is not None:
            self.source_lengths = _without(self.source_lengths, row)
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = _without(layer.keys, row), _without(layer.values, row)
            if layer.source is not None:
                layer.source = (_without(layer.source[0], row), _without(layer.source[1], row))


def _below(top: Tensor, bottom: Tensor, slots: int) -> Tensor:
    """Rows below rows: (B, G, C, E) and (B', G, C', E) to (B + B', G, slots, E), cut or with zeros behind."""
    joined = top.new_zeros(len(top) + len(bottom), top.shape[1], slots, top.shape[3])
    for rows, held in ((joined[: len(top)], top), (joined[len(top) :], bottom)):
        rows[:, :, : held.shape[2]] = held[:, :, :slots]
    return joined


def _without(x: Tensor, row: int) -> Tensor:
    """All rows but one, in the memory they have: the last stands in its place."""
    x[row] = x[-1]
    return x[:-1]


class TreeCache(KVCache):
    """K continuations of every row of a cache, which goes over into this one; what they share is held once.

    A step brings one token for each branch, ids (B, K), and each looks along its own path alone. When a search goes on
    from other branches, only the paths change: no key or value is ever copied, and the source is read once a row.
    """

    def __init__(self, trunk: KVCache, branches: int, steps: int):
        self.config, self.max_length, self.slots, self.even = (
            trunk.config,
            trunk.max_length,
            trunk.slots,
            trunk.uniform_lengths,
        )
        self.capacity, self.first_slots = trunk.max_length + branches * steps, branches * FIRST_SLOTS
        self.lengths, self.layers = trunk.lengths, trunk.layers
        self.source, self.source_lengths = trunk.source, trunk.source_lengths
        device, rows = self.lengths.device, len(trunk)
        self.positions = torch.arange(trunk.max_length, device=device).expand(rows, -1)  # (B, slots used), of the keys
        held = self.positions < self.lengths[:, None]
        self.tree = held[:, None].expand(-1, branches, -1)  # (B, K, slots used)
        self.itself = torch.eye(branches, dtype=torch.bool, device=device)  # (K, K)

    def begin(self, ids: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Mask]:
        """Make room for a token of each branch, ids (B, K); returns their positions (B or 1, 1) and their paths."""
        if counts is not None or ids.shape != self.tree.shape[:2]:
            raise ValueError(f"a step of a tree is one token a branch, {tuple(self.tree.shape[:2])}, without padding")
        readable = self.max_length + ids.shape[1]
        if readable > self.capacity:
            raise ValueError("the tree was made for fewer steps")
        self._grow(readable)
        self._place(slice(self.max_length, readable), readable)
        now = self.lengths[:, None]
        self.tree = torch.cat([self.tree, self.itself.expand(len(self), -1, -1)], dim=2)
        self.positions = torch.cat([self.positions, now.expand(ids.shape)], dim=1)
        return now[:1] if self.even else now, Mask(tree=TreeMask(self.tree, now, self.positions))

    def advance(self, tokens: int, counts: Tensor | None = None) -> None:
        """The step is done: every branch is longer by one."""
        self.lengths, self.max_length = self.lengths + 1, self.max_length + tokens

    def reorder_beams(self, parents: Tensor) -> None:
        """Branch k of row b goes on from where branch parents[b, k] stands."""
        self.tree = self.tree.gather(1, parents[:, :, None].expand(-1, -1, self.tree.shape[2]))

    def select(self, rows: Tensor) -> None:
        """Keep, reorder or drop rows with all their branches."""
        self._take(rows)
        self.tree, self.positions = self.tree[rows], self.positions[rows]
