"""Prefill and decode steps of a batch that has the cache of a step runner to itself.

R rows · P prompt tokens · T tokens of a row in a step · W table width · V vocabulary

Beam search, speculative decoding and alternatives run on this. Tables are of single slots: the sources come first, in
pages, then the prompts, each stored once; then every new token takes a slot. A row that continues another one copies
its table, so rows share any part of their past, and no key or value is ever copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.inference.batches import raise_if_cancelled
from clearhead.inference.make_runner import StepNetwork, make_runner
from clearhead.inference.page_pool import pages_for
from clearhead.inference.request import TokenIds
from clearhead.inference.step import PAGE_SIZE, SCRATCH_PAGE, EncodeInputs, StepInputs, StepRunner

PREFILL_TOKENS = 2048  # of a step, to bound memory
MORE_COLUMNS = 32  # by which the table grows

Ints = NDArray[np.int32]
Rows = NDArray[np.integer[Any]]


class StepBatch:
    """Rows of a batch: their tokens in the cache so far, and where they are."""

    def __init__(self, runner: StepRunner, prompts: Sequence[TokenIds], sources: Sequence[TokenIds] | None = None):
        self.runner, self.prompts = runner, prompts
        self.config, self.device = runner.cache.config, runner.cache.device
        self.lengths: Ints = np.array([len(prompt) for prompt in prompts], np.int32)  # (R,) tokens in the cache
        self.assigned: Ints = self.lengths  # (R,) table entries with a slot; more after a rewind
        self.source_table: Ints | None = None
        self.source_lengths: Ints | None = None
        self._next_slot = (SCRATCH_PAGE + 1) * PAGE_SIZE
        if sources is not None:
            self._encode(sources)
        used = np.arange(self.lengths.max()) < self.lengths[:, None]  # (R, P)
        self.table: Ints = np.zeros(used.shape, np.int32)
        self.table[used] = self._new_slots(int(self.lengths.sum()))

    @classmethod
    def of(
        cls, network: StepNetwork, prompts: Sequence[TokenIds], sources: Sequence[TokenIds] | None, new_tokens: int
    ) -> StepBatch:
        """Return a batch on a runner of its own, for at most `new_tokens` of all rows together."""
        longest = max(map(len, sources or ()), default=0)
        pages = pages_of_batch(len(prompts), max(map(len, prompts)), longest, new_tokens)
        return cls(make_runner(network, pages, len(prompts)), prompts, sources)

    def _encode(self, sources: Sequence[TokenIds]) -> None:
        """Run the encoder; the sources take the first pages."""
        self.source_lengths = np.array([len(source) for source in sources], np.int32)
        counts = -(-self.source_lengths // PAGE_SIZE)
        first = SCRATCH_PAGE + 1 + np.cumsum(counts) - counts
        columns = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        self.source_table = (first[:, None] + columns).astype(np.int32)
        self.runner.encode(EncodeInputs(sources, self.source_table))
        self._next_slot += int(counts.sum()) * PAGE_SIZE

    def _new_slots(self, count: int) -> Ints:
        self._next_slot += count
        assert self._next_slot <= self.runner.cache.pages * PAGE_SIZE, "the caller makes a runner with enough pages"
        return np.arange(self._next_slot - count, self._next_slot, dtype=np.int32)

    def prefill(self) -> Tensor:
        """Compute the prompts; return the logits (R, V) after each."""
        ids = np.concatenate([np.asarray(prompt, np.int32) for prompt in self.prompts])
        rows = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)
        ends = np.cumsum(self.lengths)
        positions = np.arange(len(ids), dtype=np.int32) - (ends - self.lengths)[rows].astype(np.int32)
        logits = []
        for begin in range(0, len(ids), PREFILL_TOKENS):
            raise_if_cancelled()
            tokens = slice(begin, begin + PREFILL_TOKENS)
            last = ends[(ends > begin) & (ends <= begin + PREFILL_TOKENS)] - 1 - begin
            out = self.runner.logits(self._inputs(ids[tokens], rows[tokens], positions[tokens], last.astype(np.int32)))
            logits.append(out if len(ids) <= PREFILL_TOKENS else out.clone())
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def step(self, ids: NDArray[np.integer[Any]]) -> Tensor:
        """Run the next tokens (R, T) of every row; return the logits (R · T, V), which the next step overwrites."""
        raise_if_cancelled()
        count, size = ids.shape
        positions = (self.lengths[:, None] + np.arange(size)).astype(np.int32)  # (R, T)
        self._assign(positions)
        rows = np.repeat(np.arange(count, dtype=np.int32), size)
        outputs = np.arange(len(rows), dtype=np.int32)
        self.lengths = self.lengths + np.int32(size)
        return self.runner.logits(self._inputs(ids.ravel().astype(np.int32), rows, positions.ravel(), outputs))

    def decode_step(self, ids: Tensor) -> Tensor:
        """Run the next tokens (R, T) of every row; return the logits (R, T, V)."""
        return self.step(ids.cpu().numpy()).unflatten(0, ids.shape)

    def _assign(self, positions: Ints) -> None:
        """Give the entries of positions (R, T) that have no slot a new one."""
        missing = int(positions.max()) + 1 - self.table.shape[1]
        if missing > 0:
            self.table = np.pad(self.table, ((0, 0), (0, missing + MORE_COLUMNS)))
        rows, columns = (positions >= self.assigned[:, None]).nonzero()
        self.table[rows, positions[rows, columns]] = self._new_slots(len(rows))
        self.assigned = np.maximum(self.assigned, positions[:, -1] + 1)

    def select(self, rows: Rows | Tensor) -> None:
        """Keep, repeat or reorder rows: row n becomes the old row rows[n]."""
        rows = rows.cpu().numpy() if isinstance(rows, Tensor) else rows
        self.table, self.lengths, self.assigned = self.table[rows], self.lengths[rows], self.assigned[rows]
        if self.source_table is not None and self.source_lengths is not None:
            self.source_table, self.source_lengths = self.source_table[rows], self.source_lengths[rows]

    def reorder(self, rows: Rows) -> None:
        """Like `select`, where each row takes the place of one with the same source and length."""
        self.table = self.table[rows]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Shorten each row to a number of tokens, prompt included."""
        self.lengths = np.array(lengths, np.int32)

    def _inputs(self, ids: Ints, rows: Ints, positions: Ints, outputs: Ints) -> StepInputs:
        """A step of neighboring rows."""
        first, end = int(rows[0]), int(rows[-1]) + 1
        here = slice(first, end)
        return StepInputs(
            ids=ids,
            rows=rows - first if first else rows,
            positions=positions,
            slots=self.table[rows, positions],
            outputs=outputs,
            numbers=np.arange(end - first, dtype=np.int32),
            table=self.table[here, : int(positions.max()) + 1],
            span=1,
            source_table=None if self.source_table is None else self.source_table[here],
            source_lengths=None if self.source_lengths is None else self.source_lengths[here],
        )


def pages_of_batch(rows: int, prompt_tokens: int, source_tokens: int, new_tokens: int) -> int:
    """Return the pages of a cache for rows with prompts and sources up to some lengths, and new tokens of all rows."""
    return SCRATCH_PAGE + 1 + rows * pages_for(source_tokens) + pages_for(rows * prompt_tokens + new_tokens)
