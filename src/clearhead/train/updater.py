"""One training step: losses of all micro-batches of a global batch, their gradient, one optimizer step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clearhead.config.train import TrainConfig
from clearhead.data import Batch
from clearhead.data.random import hash_ints
from clearhead.train.distributed import DistContext, autocast
from clearhead.train.losses import Loss
from clearhead.train.lr_schedule import lr_at_step
from clearhead.train.objective import NO_ACCURACY, Objective, StepContext
from clearhead.train.optimizer import clip_grad_norm, set_lr

MAX_LOSS_SCALE = 2.0**24


@dataclass
class LossScaler:
    """Dynamic loss scaling for fp16: halve the scale on overflow, double it after `growth_interval` good steps."""

    scale: float = 2.0**16
    steps: int = 0  # since the scale last changed
    growth_interval: int = 2000

    def update(self, finite: bool) -> None:
        """Adjust the scale after a step whose gradients were finite or not."""
        if not finite:
            self.scale, self.steps = max(1.0, self.scale / 2), 0
            return
        self.steps += 1
        if self.steps >= self.growth_interval:
            self.scale, self.steps = min(MAX_LOSS_SCALE, self.scale * 2), 0


def loss_sums(losses: dict[str, Loss]) -> dict[str, Tensor]:
    """Return (unsmoothed, count, correct) of every loss as one float64 tensor."""
    return {
        name: torch.stack([loss.unsmoothed.detach().double(), loss.count.double(), loss.correct.double()])
        for name, loss in losses.items()
    }


@dataclass
class Metrics:
    """Running sums between two log lines; they stay on the device until they are read."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # loss name → (unsmoothed, count, correct)
    tokens: int = 0

    def add(self, losses: dict[str, Loss]) -> None:
        """Add the losses of a micro-batch."""
        self.add_sums(loss_sums(losses))

    def add_sums(self, sums: dict[str, Tensor]) -> None:
        """Add the result of `loss_sums`."""
        for name, values in sums.items():
            self.sums[name] = self.sums[name] + values if name in self.sums else values.clone()

    def totals(self, dist: DistContext) -> dict[str, list[float]]:
        """Return the sums over all processes."""
        return {name: dist.sum(sums.cpu()).tolist() for name, sums in self.sums.items()}

    def means(self, dist: DistContext) -> dict[str, float]:
        """Return `loss` and `accuracy` of the task over all processes; a second loss is logged under its own name."""
        means: dict[str, float] = {}
        for name, (unsmoothed, count, correct) in self.totals(dist).items():
            means[name if means else "loss"] = unsmoothed / max(count, 1)
            if name not in NO_ACCURACY:
                means[f"{name}_accuracy" if "accuracy" in means else "accuracy"] = correct / max(count, 1)
        return means


@dataclass
class Updater:
    """The optimizer and everything else that determines an update, except the batch."""

    objective: Objective
    parallel_objective: nn.Module  # the objective wrapped in DDP or FSDP
    optimizer: torch.optim.Optimizer
    settings: TrainConfig
    dist: DistContext
    dtype: torch.dtype
    scaler: LossScaler | None = None

    def update(self, batches: tuple[Batch, ...], step: int, metrics: Metrics) -> Tensor:
        """Train on one global batch; return the gradient norm, not finite if the update was skipped.

        Losses are divided by the counts over all micro-batches and processes, so that gradients add up to that of the
        global batch. Random draws depend only on (seed, step, micro-batch, rank).
        """
        counts = self.counts(batches)
        losses = []
        for index, batch in enumerate(batches):
            context = StepContext(step, torch.Generator().manual_seed(self.seed(step, index)))
            with self._sync_gradients(index + 1 == len(batches)):
                losses.append(self.forward_backward(batch.to(self.dist.device), counts, context))
        for micro_losses in losses:  # only now: an out-of-memory error repeats all micro-batches
            metrics.add(micro_losses)
        metrics.tokens += sum(batch.num_tokens for batch in batches)
        self.set_lr(step)
        return self.step()

    def seed(self, step: int, micro_batch: int = 0) -> int:
        """Seed this process's generators, dropout included, for one micro-batch of a step."""
        seed = int(hash_ints(self.settings.seed, step, micro_batch, self.dist.rank)) >> 1
        # torch.manual_seed is slow: it queries every kind of device.
        torch.default_generator.manual_seed(seed)
        if self.dist.device.type != "cpu":
            (torch.cuda.manual_seed if self.dist.device.type == "cuda" else torch.manual_seed)(seed)
        return seed

    def set_lr(self, step: int) -> None:
        """Set the optimizer's learning rate to that of a step."""
        set_lr(self.optimizer, lr_at_step(self.settings, step, self.settings.steps))

    def forward_backward(
        self,
        batch: Batch,
        counts: Mapping[str, float | Tensor],
        context: StepContext | None,
        weights: dict[str, Tensor] | None = None,
    ) -> dict[str, Loss]:
        """Accumulate the gradients of one micro-batch, already on the device; return its losses.

        `weights` replace the network's own by name, and receive the gradients.
        """
        with autocast(self.dist.device, self.dtype):
            losses = (
                functional_call(self.parallel_objective, weights, (batch, context))
                if weights
                else self.parallel_objective(batch, context)
            )
        normalized = sum(loss.total / counts[name] for name, loss in losses.items())
        assert isinstance(normalized, Tensor)
        # DDP and FSDP average gradients over processes; times the world size, they are summed.
        (normalized * self.dist.world_size * (self.scaler.scale if self.scaler else 1.0)).backward()
        return {name: Loss(*(value.detach() for value in loss)) for name, loss in losses.items()}

    def step(self) -> Tensor:
        """Clip gradients and update the weights, unless the gradient norm is not finite; return the norm."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.scaler:
            torch._foreach_div_([p.grad for p in parameters if p.grad is not None], self.scaler.scale)
        grad_norm = clip_grad_norm(parameters, self.settings.grad_clip)
        # With found_inf = 1, the fused optimizer skips the update on the device, without a sync.
        finite = grad_norm.isfinite()
        self.optimizer.found_inf = (~finite).float().reshape(())  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler:
            self.scaler.update(bool(finite))
        return grad_norm

    def counts(self, batches: tuple[Batch, ...]) -> dict[str, float]:
        """Return the labeled items of each loss in the global batch."""
        local = [self.objective.counts(batch) for batch in batches]
        total = self.dist.sum(torch.tensor([list(counts.values()) for counts in local], dtype=torch.float64).sum(0))
        return {name: max(1.0, count) for name, count in zip(local[0], total.tolist(), strict=True)}

    def _sync_gradients(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        """Exchange gradients between processes after the last micro-batch only."""
        if self.dist.world_size == 1:
            return contextlib.nullcontext()
        if isinstance(self.parallel_objective, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext() if enabled else self.parallel_objective.no_sync()
        self.parallel_objective.set_requires_gradient_sync(enabled)  # type: ignore[operator]
        return contextlib.nullcontext()
