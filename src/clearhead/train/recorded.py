"""One update as a CUDA graph: recorded once, then replayed, so that the GPU never waits for Python.

Worth it where all batches have one shape, as windows of a text do. What changes between steps (the batch, the rate,
the counts, the random seed) is copied into place before each replay.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from clearhead.data import Batch
from clearhead.train.parallel import same_shapes
from clearhead.train.step import Progress, Updater

log = logging.getLogger("clearhead")
WARM = 3  # ordinary updates before the recording: kernels are compiled, the optimiser has its moments


class Recorded:
    """Stands in for an updater; whatever cannot be replayed goes the ordinary way."""

    def __init__(self, updater: Updater):
        self.updater, self.done = updater, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Batch | None = None

    def update(self, batches: tuple[Batch, ...], step: int, progress: Progress) -> Tensor:
        """As `Updater.update`."""
        if self.done < WARM or not self._recorded(batches):
            self.done += 1
            return self.updater.update(batches, step, progress)
        assert self.graph is not None
        assert self.batch is not None
        for name, tensor in batches[0].tensors.items():
            self.batch.tensors[name].copy_(tensor, non_blocking=True)
        for name, count in self.updater.counts(batches).items():
            self.counts[name].fill_(count)
        self.updater.set_rate(step)
        self.updater.seed(step)
        self.graph.replay()
        progress.add(self.found)
        progress.tokens += batches[0].tokens
        return self.norm.clone()

    def _recorded(self, batches: tuple[Batch, ...]) -> bool:
        """Whether there is a graph for such batches; the first one makes it."""
        if len(batches) != 1 or batches[0].documents:
            return False
        shapes = {name: tensor.shape for name, tensor in batches[0].tensors.items()}
        if self.batch is None:
            self._record(batches[0])
        assert self.batch is not None
        return self.graph is not None and shapes == {name: x.shape for name, x in self.batch.tensors.items()}

    def _record(self, batch: Batch) -> None:
        device = self.updater.place.device
        self.batch = batch.to(device)
        self.counts = {name: torch.ones((), device=device) for name in self.updater.objective.counts(batch)}
        torch.cuda.empty_cache()  # a recording keeps memory of its own
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.found = self.updater.gradients(self.batch, self.counts, None)
                self.norm = self.updater.step()
            self.graph = graph
        except torch.OutOfMemoryError:
            log.info("there is no memory to record a step; going on without")
            self.updater.optimiser.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()


def recorded(updater: Updater) -> Updater | Recorded:
    """The updater, recorded where that can be done: one process, one GPU, one shape, no scaling of the loss."""
    fits = updater.place.device.type == "cuda" and updater.place.processes == 1 and updater.scaler is None
    compiled = updater.objective.piece is not None
    return Recorded(updater) if fits and compiled and same_shapes(updater.objective.data) else updater
