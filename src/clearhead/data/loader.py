"""Batches one after the other, made ahead by workers, each process taking its share of every global batch."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from clearhead.data.batch import Batch
from clearhead.data.dataset import Dataset
from clearhead.data.order import START, BatchPlan, Position, batch_plans


class GlobalBatch(NamedTuple):
    """This process's share of one global batch, in one or more micro-batches, and where to go on after it."""

    batches: tuple[Batch, ...]
    plan: BatchPlan

    @property
    def after(self) -> Position:
        """The position that a run resumes from once this step is done."""
        return self.plan.after


class Loader:
    """Steps from a position on: endless and shuffled for training, one epoch in order otherwise.

    A global batch is cut into `processes` × `accumulation` parts; process `rank` gets its `accumulation` of them. What
    is in a global batch, and in which order, depends on neither, nor on the number of workers.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        pool: int = 1 << 15,
        position: Position = START,
        rank: int = 0,
        processes: int = 1,
        accumulation: int = 1,
        workers: int = 2,
        pinned: bool = False,
    ):
        self.dataset, self.tokens, self.seed, self.shuffle, self.pool = dataset, tokens, seed, shuffle, pool
        self.position, self.rank, self.processes, self.accumulation = position, rank, processes, accumulation
        self.workers, self.pinned = workers, pinned

    def __iter__(self) -> Iterator[GlobalBatch]:
        order = batch_plans(
            self.dataset, self.tokens, self.seed, pool=self.pool, shuffle=self.shuffle, position=self.position
        )
        if not self.workers:
            yield from map(self._step, order)
            return
        # Threads: gathering tokens is numpy's work, which lets others run, and nothing has to be sent between them.
        executor = ThreadPoolExecutor(self.workers, "clearhead-data")
        num_draft_tokens: deque[Future[GlobalBatch]] = deque()
        try:
            for draw in order:
                num_draft_tokens.append(executor.submit(self._step, draw))
                if len(num_draft_tokens) > 2 * self.workers:
                    yield num_draft_tokens.popleft().result()
            while num_draft_tokens:
                yield num_draft_tokens.popleft().result()
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def _step(self, draw: BatchPlan) -> GlobalBatch:
        parts = np.array_split(draw.samples, self.processes * self.accumulation)
        own = parts[self.rank * self.accumulation : (self.rank + 1) * self.accumulation]
        batches = [
            self.dataset.batch(part, draw.epoch, self.seed)
            if len(part)
            else self.dataset.batch(draw.samples[:1], draw.epoch, self.seed).ignored()
            for part in own
        ]
        return GlobalBatch(tuple(batch.pin() if self.pinned else batch for batch in batches), draw)
