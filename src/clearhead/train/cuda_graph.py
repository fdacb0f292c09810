"""CUDA graph capture of a whole training step, one graph per batch shape, so that the GPU never waits for Python.

Pays off where many batches have the same shape: fixed windows of text, and packed rows of rounded length. What changes
between steps (batch, learning rate, counts, random seed) is copied into the graph's inputs before each replay.
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
from clearhead.ops.adamw import FusedAdamW, fused_adamw_supports
from clearhead.train.distributed import has_static_shapes, network_stacks
from clearhead.train.objective import Objective
from clearhead.train.updater import Metrics, Updater, loss_sums

log = logging.getLogger("clearhead")
WARMUP_STEPS = 3  # eager steps of a shape before its capture; they compile kernels
MAX_GRAPHS = 64  # batches of further shapes run eagerly

StepResult = tuple[dict[str, Tensor], Tensor]  # loss sums and gradient norm


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph with its static inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    counts: dict[str, Tensor]
    sums: dict[str, Tensor]
    grad_norm: Tensor
    grad_pointers: Tensor | None  # read by the fused optimizer at every replay

    def copy_inputs(self, batch: Batch, counts: dict[str, float]) -> None:
        """Copy a batch of the same shape into the static inputs."""
        for name, tensor in batch.tensors.items():
            self.batch.tensors[name].copy_(tensor, non_blocking=True)
        for side, documents in batch.documents.items():
            self.batch.documents[side].lengths.copy_(documents.lengths, non_blocking=True)
        for name, count in counts.items():
            self.counts[name].fill_(count)


class GraphUpdater:
    """An Updater that replays captured graphs, and runs eagerly what cannot be replayed."""

    def __init__(self, updater: Updater):
        self.updater = updater
        self.seen: Counter[tuple[object, ...]] = Counter()
        self.graphs: dict[tuple[object, ...], CapturedGraph] = {}
        self.pool: Any = None  # memory shared by all graphs
        self.adam: FusedAdamW | None = None
        self.copies_current = False  # whether the bf16 copies match the weights

    def update(self, batches: tuple[Batch, ...], step: int, metrics: Metrics) -> Tensor:
        """See `Updater.update`."""
        if len(batches) != 1:
            self.copies_current = False
            return self.updater.update(batches, step, metrics)
        batch = batches[0]
        if batch.documents:
            batch = batch.pad_to_bucket(self.updater.objective.network.config.max_positions)
        self._prepare_optimizer()
        captured = self._graph_for(batch)
        counts = self.updater.counts(batches)
        self.updater.set_lr(step)
        self.updater.seed(step)
        if captured is None:
            try:
                sums, grad_norm = self._run(batch.to(self.updater.dist.device), counts, self._new_grad_pointers())
            except torch.OutOfMemoryError:
                self._zero_grad()
                raise
        else:
            captured.copy_inputs(batch, counts)
            captured.graph.replay()
            sums, grad_norm = captured.sums, captured.grad_norm.clone()
        metrics.add_sums(sums)
        metrics.tokens += batch.num_tokens
        return grad_norm

    def _prepare_optimizer(self) -> None:
        """Build the fused optimizer at the first step, when a resumed state is loaded; refresh its bf16 copies."""
        updater = self.updater
        trainable = (p for group in updater.optimizer.param_groups for p in group["params"])
        if self.adam is None and fused_adamw_supports(updater.dist.device, updater.dtype, trainable):
            assert isinstance(updater.optimizer, torch.optim.AdamW)
            self.adam = FusedAdamW(updater.optimizer, linear_parameters(updater.objective), updater.dtype)
        elif self.adam is not None and not self.copies_current:
            self.adam.refresh_copies()
        self.copies_current = True

    def _run(self, batch: Batch, counts: Mapping[str, float | Tensor], grad_pointers: Tensor | None) -> StepResult:
        """The captured part of a step: forward, backward, optimizer step."""
        if self.adam is None or grad_pointers is None:
            sums = loss_sums(self.updater.forward_backward(batch, counts, None))
            return sums, self.updater.step()
        sums = loss_sums(self.updater.forward_backward(batch, counts, None, self.adam.bf16_weights))
        return sums, self.adam.step(self.updater.settings.grad_clip, grad_pointers)

    def _new_grad_pointers(self) -> Tensor | None:
        return None if self.adam is None else self.adam.new_grad_pointers()

    def _zero_grad(self) -> None:
        """Drop the gradients of a step that ran out of memory."""
        self.updater.optimizer.zero_grad(set_to_none=True)
        if self.adam is not None:
            self.adam.zero_grad()

    def _graph_for(self, batch: Batch) -> CapturedGraph | None:
        """The graph for a batch's shape, captured once the shape has been seen often enough."""
        shape = batch.shape_key
        self.seen[shape] += 1
        if shape not in self.graphs and self.seen[shape] > WARMUP_STEPS and len(self.graphs) < MAX_GRAPHS:
            try:
                self.graphs[shape] = self._capture(batch)
            except torch.OutOfMemoryError:
                log.info("not enough memory to capture a CUDA graph; continuing without")
                self._zero_grad()
                torch.cuda.empty_cache()
        return self.graphs.get(shape)

    def _capture(self, batch: Batch) -> CapturedGraph:
        device = self.updater.dist.device
        static_batch = batch.to(device)
        counts = {name: torch.ones((), device=device) for name in self.updater.objective.counts(batch)}
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()  # graphs allocate from a pool of their own
        graph, grad_addresses = torch.cuda.CUDAGraph(), self._new_grad_pointers()
        # Thread-local: the loader's threads may pin memory meanwhile, which a global capture would refuse.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            sums, grad_norm = self._run(static_batch, counts, grad_addresses)
        return CapturedGraph(graph, static_batch, counts, sums, grad_norm, grad_addresses)


def linear_parameters(objective: Objective) -> dict[str, nn.Parameter]:
    """Return the weights and biases of the linear layers in all blocks, by name."""
    modules = [module for stack in network_stacks(objective.network) for module in stack.layers.modules()]
    linear = {p for module in modules if isinstance(module, nn.Linear) for p in module.parameters()}
    return {name: p for name, p in objective.named_parameters() if p in linear}


def capture_steps(updater: Updater) -> Updater | GraphUpdater:
    """Return the updater with CUDA graphs where they apply: one process, one GPU, no loss scaling, few batch shapes."""
    dist, data = updater.dist, updater.objective.data
    single_gpu = dist.device.type == "cuda" and dist.world_size == 1
    capturable = (
        updater.scaler is None
        and updater.settings.scheduled_sampling is None
        and updater.objective.chunk_fn is not None
    )
    few_shapes = has_static_shapes(data) or (data.packed and data.task in ("translation", "language-model"))
    return GraphUpdater(updater) if single_gpu and capturable and few_shapes else updater
