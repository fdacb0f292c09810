"""Loader: iterates over global batches; worker threads prepare them, and each process takes its part."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from clearhead.data.batch import Batch
from clearhead.data.batch_order import START, BatchPlan, Position, batch_plans
from clearhead.data.dataset import Dataset


class GlobalBatch(NamedTuple):
    """This process's micro-batches of one global batch."""

    batches: tuple[Batch, ...]
    plan: BatchPlan

    @property
    def next_position(self) -> Position:
        """The position to resume from after this step."""
        return self.plan.next_position


class Loader:
    """Iterate over global batches from a position: endless and shuffled for training, or one epoch in order.

    A global batch is split into world_size × grad_accum micro-batches; process `rank` gets grad_accum of them. Content
    and order of the global batches depend neither on that split nor on the number of workers.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        bucket_size: int = 1 << 15,
        position: Position = START,
        rank: int = 0,
        world_size: int = 1,
        grad_accum: int = 1,
        workers: int = 2,
        pin_memory: bool = False,
    ):
        self.dataset, self.seed, self.shuffle, self.position = dataset, seed, shuffle, position
        self.batch_tokens, self.bucket_size = batch_tokens, bucket_size
        self.rank, self.world_size, self.grad_accum = rank, world_size, grad_accum
        self.workers, self.pin_memory = workers, pin_memory

    def __iter__(self) -> Iterator[GlobalBatch]:
        plans = batch_plans(
            self.dataset,
            self.batch_tokens,
            self.seed,
            bucket_size=self.bucket_size,
            shuffle=self.shuffle,
            position=self.position,
        )
        if not self.workers:
            yield from map(self._make_batch, plans)
            return
        # Threads suffice: numpy releases the GIL while it gathers tokens, and nothing has to be pickled.
        executor = ThreadPoolExecutor(self.workers, "clearhead-data")
        pending: deque[Future[GlobalBatch]] = deque()
        try:
            for plan in plans:
                pending.append(executor.submit(self._make_batch, plan))
                if len(pending) > 2 * self.workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def _make_batch(self, plan: BatchPlan) -> GlobalBatch:
        parts = np.array_split(plan.samples, self.world_size * self.grad_accum)
        batches = [
            self.dataset.batch(part, plan.epoch, self.seed)
            if len(part)
            else self.dataset.batch(plan.samples[:1], plan.epoch, self.seed).without_labels()
            for part in parts[self.rank * self.grad_accum : (self.rank + 1) * self.grad_accum]
        ]
        return GlobalBatch(tuple(batch.pin_memory() if self.pin_memory else batch for batch in batches), plan)
