"""One update as a CUDA graph: recorded once for each shape, then replayed, so that the GPU never waits for Python.

Worth it where many batches have one shape, as windows of a text do, and packed rows that are rounded. What changes
between steps (the batch, the rate, the counts, the random seed) is copied into place before each replay.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.data import Batch
from clearhead.train.losses import Loss
from clearhead.train.parallel import same_shapes
from clearhead.train.step import Progress, Updater

log = logging.getLogger("clearhead")
WARM = 3  # ordinary updates before a recording: kernels are compiled, the optimiser has its moments
MOST = 64  # recordings; batches of other shapes go the ordinary way


@dataclass(frozen=True)
class Recording:
    """A graph, where it reads from, and where it leaves what it found."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    counts: dict[str, Tensor]
    found: dict[str, Loss]
    norm: Tensor

    def fill(self, batch: Batch, counts: dict[str, float]) -> None:
        """Put a batch of the same shape into place."""
        for name, tensor in batch.tensors.items():
            self.batch.tensors[name].copy_(tensor, non_blocking=True)
        for side, documents in batch.documents.items():
            self.batch.documents[side].lengths.copy_(documents.lengths, non_blocking=True)
        for name, count in counts.items():
            self.counts[name].fill_(count)


class Recorded:
    """Stands in for an updater; whatever cannot be replayed goes the ordinary way."""

    def __init__(self, updater: Updater):
        self.updater = updater
        self.seen: Counter[tuple[object, ...]] = Counter()
        self.recordings: dict[tuple[object, ...], Recording] = {}
        self.pool: Any = None  # memory that all recordings use, one after the other

    def update(self, batches: tuple[Batch, ...], step: int, progress: Progress) -> Tensor:
        """As `Updater.update`."""
        if len(batches) != 1:
            return self.updater.update(batches, step, progress)
        batch = batches[0]
        if batch.documents:
            batch = batch.rounded(self.updater.objective.network.config.max_positions)
        recording = self._recording(batch)
        if recording is None:
            return self.updater.update((batch,), step, progress)
        recording.fill(batch, self.updater.counts(batches))
        self.updater.set_rate(step)
        self.updater.seed(step)
        recording.graph.replay()
        progress.add(recording.found)
        progress.tokens += batch.tokens
        return recording.norm.clone()

    def _recording(self, batch: Batch) -> Recording | None:
        """The recording for a batch of this shape; a shape that comes again and again gets one."""
        shape = batch.shape
        self.seen[shape] += 1
        if shape not in self.recordings and self.seen[shape] > WARM and len(self.recordings) < MOST:
            try:
                self.recordings[shape] = self._record(batch)
            except torch.OutOfMemoryError:
                log.info("there is no memory to record a step; going on without")
                self.updater.optimiser.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
        return self.recordings.get(shape)

    def _record(self, batch: Batch) -> Recording:
        device = self.updater.place.device
        there = batch.to(device)
        counts = {name: torch.ones((), device=device) for name in self.updater.objective.counts(batch)}
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()  # recordings keep memory of their own
        graph = torch.cuda.CUDAGraph()
        # Thread-local: meanwhile the loader's thread may pin memory, which is none of this recording's business.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            found = self.updater.gradients(there, counts, None)
            norm = self.updater.step()
        return Recording(graph, there, counts, found, norm)


def recorded(updater: Updater) -> Updater | Recorded:
    """The updater, recorded where that can be done: one process, one GPU, no scaling of the loss, few shapes."""
    place, data = updater.place, updater.objective.data
    alone = place.device.type == "cuda" and place.processes == 1
    plain = updater.scaler is None and updater.settings.sampling is None and updater.objective.piece is not None
    few = same_shapes(data) or (data.packed and data.task in ("translation", "language-model"))
    return Recorded(updater) if alone and plain and few else updater
