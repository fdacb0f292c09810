"""The reference step: the network itself over paged keys and values, on any device.

N tokens · R rows · M outputs · B rows of a group · T tokens of a row · S keys · G key-value heads · E head dim

Rows with one token run together, and rows with more in groups of similar length: each group is a padded batch of the
network, whose cache interface gathers the slots of every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.inference.sampling import Choice, SamplingTensors, TokenCounts, choose_tokens
from clearhead.inference.step import (
    LAST_TOKEN,
    PAGE_SIZE,
    EncodeInputs,
    PagedKVCache,
    SamplingInputs,
    StepHandle,
    StepInputs,
    StepOutput,
)
from clearhead.model import Decoder, EncoderDecoder, KVCache
from clearhead.ops.masks import Mask

Slots = slice | Tensor  # of all keys of the rows of a group: consecutive ones of a single row, or (B, S)


class ReferenceRunner:
    """A StepRunner that runs the network eagerly."""

    asynchronous = False

    def __init__(self, network: Decoder | EncoderDecoder, cache: PagedKVCache, max_rows: int):
        if network.training:
            raise ValueError("the network is in training mode, where dropout is on; call network.eval() first")
        self.network, self.cache, self.max_rows = network, cache, max_rows
        self.last_tokens = torch.zeros(max_rows, dtype=torch.long, device=cache.device)
        self.counts: TokenCounts | None = None  # once a row has penalties

    def start_row(self, number: int, prompt: list[int], new: list[int]) -> None:
        """Count the tokens of a row with penalties."""
        if self.counts is None:
            self.counts = TokenCounts(self.max_rows, self.cache.config.target_vocab, self.cache.device)
        self.counts.start(number, prompt, new)

    @torch.inference_mode()
    def encode(self, inputs: EncodeInputs) -> None:
        """Run the encoder, and write the cross-attention keys and values of every decoder layer."""
        network, device = self.network, self.cache.device
        assert isinstance(network, EncoderDecoder)
        counts = np.array([len(row) for row in inputs.ids])
        used = np.arange(counts.max()) < counts[:, None]  # (B, S)
        ids = np.zeros(used.shape, np.int64)
        ids[used] = np.concatenate([np.asarray(row) for row in inputs.ids])
        rows = zip(inputs.ids, inputs.tables, strict=True)
        slots = np.concatenate([_slots(np.array(table), len(row)) for row, table in rows])
        lengths = None if used.all() else torch.from_numpy(counts).to(device)
        hidden = network.encode(torch.from_numpy(ids).to(device), lengths).hidden_states
        mask, targets = torch.from_numpy(used).to(device), torch.from_numpy(slots).to(device)
        for number, layer in enumerate(network.decoder.layers):
            for pool, x in zip(self._pools(number), layer.cross_attention.project_kv(hidden), strict=True):  # type: ignore[union-attr, operator]
                pool[targets] = x.transpose(1, 2)[mask].to(pool.dtype)

    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> StepHandle:
        """Run a step and choose a token for each output."""
        return ReferenceHandle(self._choose(self.logits(inputs), sampling))

    def choose(self, logits: Tensor, sampling: SamplingInputs) -> StepOutput:
        """Choose tokens from logits (M, V)."""
        return self._choose(logits, sampling).output()

    @torch.inference_mode()
    def _choose(self, logits: Tensor, sampling: SamplingInputs) -> Choice:
        tensors = SamplingTensors.from_inputs(sampling, self.cache.device)
        choice = choose_tokens(logits, tensors, self.counts)
        self.last_tokens[tensors.numbers] = choice.tokens
        return choice

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> Tensor:
        """Run a step without choosing: logits (M, V)."""
        device = self.cache.device
        hidden: Tensor | None = None  # (N, D)
        ids = torch.from_numpy(inputs.ids).to(device).long()
        if (inputs.ids == LAST_TOKEN).any():
            numbers = torch.from_numpy(inputs.numbers[inputs.rows]).to(device)
            ids = torch.where(ids == LAST_TOKEN, self.last_tokens[numbers], ids)
        for group in _groups(inputs):
            tokens = torch.from_numpy(group.tokens).to(device)  # (B, T)
            lengths = None if group.used.all() else torch.from_numpy(group.used.sum(axis=1)).to(device)
            out = self._decode(ids[tokens], lengths, StepCache(self, inputs, group))  # (B, T, D)
            used = torch.from_numpy(group.used).to(device)
            if hidden is None:
                hidden = out.new_empty(len(inputs.ids), out.shape[2])
            hidden[tokens[used]] = out[used]
        assert hidden is not None
        logits = self.network.logits(hidden[torch.from_numpy(inputs.outputs).to(device)])
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def _decode(self, ids: Tensor, lengths: Tensor | None, cache: StepCache) -> Tensor:
        if isinstance(self.network, EncoderDecoder):
            return self.network.decode(ids, None, lengths, cache=cache)
        return self.network.decode(ids, lengths, cache=cache)

    def copy_slots(self, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copy keys and values of all layers between slots."""
        sources, targets = (torch.from_numpy(x).to(self.cache.device) for x in (source, target))
        for pool in (*self.cache.keys, *self.cache.values):
            pool[targets] = pool[sources]

    def _pools(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.keys[layer], self.cache.values[layer]


class ReferenceHandle:
    """A step whose tokens are chosen already."""

    def __init__(self, choice: Choice):
        self.choice = choice

    def result(self) -> StepOutput:
        """Copy the tokens to the host."""
        return self.choice.output()


class Group(NamedTuple):
    """Rows that run as one padded batch."""

    rows: NDArray[np.int64]  # (B,)
    tokens: NDArray[np.int64]  # (B, T) indices of tokens; 0 at padding
    used: NDArray[np.bool_]  # (B, T) False at padding


def _groups(inputs: StepInputs) -> Iterator[Group]:
    """Group rows whose numbers of tokens have the same power of two above them: one token, two, up to four, …"""
    if inputs.is_decode:
        tokens = np.argsort(inputs.rows)[:, None]
        yield Group(np.arange(len(tokens)), tokens, np.ones(tokens.shape, dtype=bool))
        return
    counts = np.bincount(inputs.rows, minlength=len(inputs.numbers))
    begins = np.flatnonzero(np.diff(inputs.rows, prepend=-1))
    first = np.zeros(len(counts), np.int64)
    first[inputs.rows[begins]] = begins
    sizes = np.array([int(count - 1).bit_length() for count in counts])
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        steps = np.arange(counts[rows].max())
        used = steps < counts[rows, None]
        yield Group(rows, np.where(used, first[rows, None] + steps, 0), used)


class StepCache(KVCache):
    """The cache interface of the network over the pages of a group."""

    def __init__(self, runner: ReferenceRunner, inputs: StepInputs, group: Group):
        self.config, device = runner.cache.config, runner.cache.device
        rows, used = group.rows, group.used
        begin = inputs.positions[group.tokens[:, 0]]  # (B,)
        lengths = begin + used.sum(axis=1)
        positions = (begin[:, None] + np.arange(used.shape[1])).clip(max=self.config.max_positions - 1)
        self.positions = torch.from_numpy(positions).to(device)
        self.start: Tensor | int = int(begin[0])
        if used.shape[1] > 1 or inputs.source_table is not None or begin.min() != begin.max():
            self.start = torch.from_numpy(begin).to(device)
        self.source, self.source_lengths, sources = None, None, None
        if inputs.source_table is not None and inputs.source_lengths is not None:
            self.source = ()  # the encoder has run
            counts = inputs.source_lengths[rows]
            sources = _gather_slots(inputs.source_table[rows], PAGE_SIZE, counts, device)
            if counts.min() != counts.max():
                self.source_lengths = torch.from_numpy(counts).to(device)
        written = torch.from_numpy(inputs.slots[group.tokens[used]]).to(device)
        keys = _gather_slots(inputs.table[rows], inputs.span, lengths, device)
        mask = None if used.all() else torch.from_numpy(used).to(device)
        self.layers: list[Any] = [
            StepLayerCache(*runner._pools(number), written, keys, mask, sources)
            for number in range(self.config.decoder_layers)
        ]

    def begin(self, ids: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Mask]:
        """Return the positions of the step and its attention mask."""
        return self.positions, Mask(causal=True, start=self.start)

    def advance(self, tokens: int, counts: Tensor | None = None) -> None:
        """Do nothing: the engine counts the tokens."""


class StepLayerCache:
    """The keys and values of one layer for the rows of a group."""

    def __init__(
        self, keys: Tensor, values: Tensor, written: Tensor, read: Slots, used: Tensor | None, sources: Slots | None
    ):
        self.pools, self.written, self.slots, self.used, self.sources = (keys, values), written, read, used, sources

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, G, T, E), but for padding; return all keys and values of the rows: (B, G, S, E) each."""
        for pool, new in zip(self.pools, (k, v), strict=True):
            new = new.transpose(1, 2)
            pool[self.written] = (new.flatten(0, 1) if self.used is None else new[self.used]).to(pool.dtype)
        keys, values = self.read()
        return keys.to(k.dtype), values.to(k.dtype)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values of the rows: (B, G, S, E) each."""
        return _read(self.pools[0], self.slots), _read(self.pools[1], self.slots)

    @property
    def source(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the sources: (B, G, S, E) each."""
        if self.sources is None:
            return None
        return _read(self.pools[0], self.sources), _read(self.pools[1], self.sources)


def _read(pool: Tensor, slots: Slots) -> Tensor:
    """Return the keys or values of slots: (B, G, S, E)."""
    return (pool[slots][None] if isinstance(slots, slice) else pool[slots]).transpose(1, 2)


def _slots(table: NDArray[Any], count: int, span: int = PAGE_SIZE) -> NDArray[np.int64]:
    """Return the slots of the first `count` positions of tables (…, entries)."""
    positions = np.arange(count)
    return table[..., positions // span].astype(np.int64) * span + positions % span


def _gather_slots(table: NDArray[np.int32], span: int, lengths: NDArray[Any], device: torch.device) -> Slots:
    """Return the slots of rows of some lengths; beyond the length slot 0, whose keys and values stay zero.

    Freed pages may hold NaN, which a weight of 0 would not mask.
    """
    slots = _slots(table, int(lengths.max()), span)  # (B, S)
    if len(slots) == 1 and (np.diff(slots[0]) == 1).all():
        return slice(int(slots[0, 0]), int(slots[0, -1]) + 1)
    return torch.from_numpy(np.where(np.arange(slots.shape[1]) < lengths[:, None], slots, 0)).to(device)
