"""One update as a CUDA graph: recorded once for each shape, then replayed, so that the GPU never waits for Python.

Worth it where many batches have one shape, as windows of a text do, and packed rows that are rounded. What changes
between steps (the batch, the rate, the counts, the random seed) is copied into place before each replay.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.data import Batch
from clearhead.ops.adamw import Adam, fused_adamw_supports
from clearhead.train.distributed import same_shapes, stacks
from clearhead.train.objective import Objective
from clearhead.train.updater import Progress, Updater, loss_sums

log = logging.getLogger("clearhead")
WARM = 3  # updates before a recording: kernels are compiled
MOST = 64  # recordings; batches of other shapes are run as they come

Found = tuple[dict[str, Tensor], Tensor]  # sums of the losses, and the length of the gradient


@dataclass(frozen=True)
class CapturedGraph:
    """A graph, where it reads from, and where it leaves what it found."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    counts: dict[str, Tensor]
    found: dict[str, Tensor]
    norm: Tensor
    places: Tensor | None  # of gradients, which the graph reads

    def fill(self, batch: Batch, counts: dict[str, float]) -> None:
        """Put a batch of the same shape into place."""
        for name, tensor in batch.tensors.items():
            self.batch.tensors[name].copy_(tensor, non_blocking=True)
        for side, documents in batch.documents.items():
            self.batch.documents[side].lengths.copy_(documents.lengths, non_blocking=True)
        for name, count in counts.items():
            self.counts[name].fill_(count)


class GraphUpdater:
    """Stands in for an updater; whatever cannot be replayed goes the ordinary way."""

    def __init__(self, updater: Updater):
        self.updater = updater
        self.seen: Counter[tuple[object, ...]] = Counter()
        self.recordings: dict[tuple[object, ...], CapturedGraph] = {}
        self.pool: Any = None  # memory that all recordings use, one after the other
        self.adam: Adam | None = None
        self.fresh = False  # whether the copies are those of the weights

    def update(self, batches: tuple[Batch, ...], step: int, progress: Progress) -> Tensor:
        """As `Updater.update`."""
        if len(batches) != 1:
            self.fresh = False
            return self.updater.update(batches, step, progress)
        batch = batches[0]
        if batch.documents:
            batch = batch.rounded(self.updater.objective.network.config.max_positions)
        self._prepare()
        recording = self._recording(batch)
        counts = self.updater.counts(batches)
        self.updater.set_lr(step)
        self.updater.seed(step)
        if recording is None:
            try:
                found, norm = self._run(batch.to(self.updater.dist.device), counts, self._places())
            except torch.OutOfMemoryError:
                self._forget()
                raise
        else:
            recording.fill(batch, counts)
            recording.graph.replay()
            found, norm = recording.found, recording.norm.clone()
        progress.add_sums(found)
        progress.tokens += batch.tokens
        return norm

    def _prepare(self) -> None:
        """Copies of the weights for the products, once the optimizer has the state that it goes on from."""
        updater = self.updater
        learning = (p for group in updater.optimizer.param_groups for p in group["params"])
        if self.adam is None and fused_adamw_supports(updater.dist.device, updater.dtype, learning):
            assert isinstance(updater.optimizer, torch.optim.AdamW)
            self.adam = Adam(updater.optimizer, of_products(updater.objective), updater.dtype)
        elif self.adam is not None and not self.fresh:
            self.adam.refresh()
        self.fresh = True

    def _run(self, batch: Batch, counts: Mapping[str, float | Tensor], places: Tensor | None) -> Found:
        """What is recorded: gradients and a step."""
        if self.adam is None or places is None:
            found = loss_sums(self.updater.forward_backward(batch, counts, None))
            return found, self.updater.step()
        found = loss_sums(self.updater.forward_backward(batch, counts, None, self.adam.copies))
        return found, self.adam.step(self.updater.settings.grad_clip, places)

    def _places(self) -> Tensor | None:
        return None if self.adam is None else self.adam.places()

    def _forget(self) -> None:
        """Gradients of a step that found no memory."""
        self.updater.optimizer.zero_grad(set_to_none=True)
        if self.adam is not None:
            self.adam.zero_grad()

    def _recording(self, batch: Batch) -> CapturedGraph | None:
        """The recording for a batch of this shape; a shape that comes again and again gets one."""
        shape = batch.shape
        self.seen[shape] += 1
        if shape not in self.recordings and self.seen[shape] > WARM and len(self.recordings) < MOST:
            try:
                self.recordings[shape] = self._record(batch)
            except torch.OutOfMemoryError:
                log.info("there is no memory to record a step; going on without")
                self._forget()
                torch.cuda.empty_cache()
        return self.recordings.get(shape)

    def _record(self, batch: Batch) -> CapturedGraph:
        device = self.updater.dist.device
        there = batch.to(device)
        counts = {name: torch.ones((), device=device) for name in self.updater.objective.counts(batch)}
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()  # recordings keep memory of their own
        graph, places = torch.cuda.CUDAGraph(), self._places()
        # Thread-local: meanwhile the loader's thread may pin memory, which is none of this recording's business.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            found, norm = self._run(there, counts, places)
        return CapturedGraph(graph, there, counts, found, norm, places)


def of_products(objective: Objective) -> dict[str, nn.Parameter]:
    """The matrices and biases of the linear layers of all blocks, by their names."""
    parts = [part for stack in stacks(objective.network) for part in stack.layers.modules()]
    inside = {p for part in parts if isinstance(part, nn.Linear) for p in part.parameters()}
    return {name: p for name, p in objective.named_parameters() if p in inside}


def capture_steps(updater: Updater) -> Updater | GraphUpdater:
    """The updater, recorded where that can be done: one process, one GPU, no scaling of the loss, few shapes."""
    place, data = updater.dist, updater.objective.data
    alone = place.device.type == "cuda" and place.world_size == 1
    plain = (
        updater.scaler is None and updater.settings.scheduled_sampling is None and updater.objective.piece is not None
    )
    few = same_shapes(data) or (data.packed and data.task in ("translation", "language-model"))
    return GraphUpdater(updater) if alone and plain and few else updater
