"""One update: losses of all parts of a global batch, one gradient, one step of the optimizer."""

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
from clearhead.train.objective import NUMERIC, Draws, Objective
from clearhead.train.optimizer import clip_grad_norm, set_rate


@dataclass
class Scaler:
    """fp16 has few exponents: losses are scaled up so that gradients do not vanish, and down when they overflow."""

    scale: float = 2.0**16
    steps: int = 0  # since the scale last changed
    patience: int = 2000

    def learn(self, finite: bool) -> None:
        """Halve after an overflow, double after a long time without."""
        if not finite:
            self.scale, self.steps = max(1.0, self.scale / 2), 0
            return
        self.steps += 1
        if self.steps >= self.patience:
            self.scale, self.steps = min(2.0**24, self.scale * 2), 0


def loss_sums(found: dict[str, Loss]) -> dict[str, Tensor]:
    """Of every loss (plain, count, right), float64."""
    return {
        name: torch.stack([loss.unsmoothed.detach().double(), loss.count.double(), loss.correct.double()])
        for name, loss in found.items()
    }


@dataclass
class Progress:
    """What is added up between two lines of the log; sums stay on the device until they are read."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # name → (plain, count, right)
    tokens: int = 0

    def add(self, found: dict[str, Loss]) -> None:
        """Take in the losses of one part."""
        self.add_sums(loss_sums(found))

    def add_sums(self, found: dict[str, Tensor]) -> None:
        """Take in sums of losses as `loss_sums` makes them."""
        for name, now in found.items():
            self.sums[name] = self.sums[name] + now if name in self.sums else now.clone()

    def totals(self, place: DistContext) -> dict[str, list[float]]:
        """The sums over all processes."""
        return {name: place.sum(sums.cpu()).tolist() for name, sums in self.sums.items()}

    def means(self, place: DistContext) -> dict[str, float]:
        """Over all processes: `loss` and `accuracy` of the task, and those of a second loss under its own name."""
        found: dict[str, float] = {}
        for name, (plain, count, right) in self.totals(place).items():
            found[name if found else "loss"] = plain / max(count, 1)
            if name not in NUMERIC:
                found[f"{name}_accuracy" if "accuracy" in found else "accuracy"] = right / max(count, 1)
        return found


@dataclass
class Updater:
    """The optimizer with everything that decides an update besides the batch."""

    objective: Objective  # the bare one
    parallel_objective: nn.Module  # the same over all processes
    optimizer: torch.optim.Optimizer
    settings: TrainConfig
    dist: DistContext
    dtype: torch.dtype
    scaler: Scaler | None = None

    def update(self, batches: tuple[Batch, ...], step: int, progress: Progress) -> Tensor:
        """Learn from one global batch; returns the length of its gradient, which is not finite if nothing was learned.

        Every loss is a share of the count over all parts and processes, so that the parts add up to the gradient of
        the whole. Random draws depend on (seed, step, part, rank) alone.
        """
        counts = self.counts(batches)
        done = []
        for part, batch in enumerate(batches):
            seed = self.seed(step, part)
            draws = Draws(step, torch.Generator().manual_seed(seed))
            with self._last_part(part + 1 == len(batches)):
                done.append(self.forward_backward(batch.to(self.dist.device), counts, draws))
        for found in done:  # only now: a part for which memory does not suffice makes all of them come again
            progress.add(found)
        progress.tokens += sum(batch.tokens for batch in batches)
        self.set_lr(step)
        return self.step()

    def seed(self, step: int, part: int = 0) -> int:
        """What this process draws by in one part of a step, dropout included."""
        seed = int(hash_ints(self.settings.seed, step, part, self.dist.rank)) >> 1
        # torch.manual_seed asks every kind of device that there may be, which takes a while.
        torch.default_generator.manual_seed(seed)
        if self.dist.device.type != "cpu":
            (torch.cuda.manual_seed if self.dist.device.type == "cuda" else torch.manual_seed)(seed)
        return seed

    def set_lr(self, step: int) -> None:
        """The learning rate of a step, to the optimizer."""
        set_rate(self.optimizer, lr_at_step(self.settings, step, self.settings.steps))

    def forward_backward(
        self,
        batch: Batch,
        counts: Mapping[str, float | Tensor],
        draws: Draws | None,
        weights: dict[str, Tensor] | None = None,
    ) -> dict[str, Loss]:
        """Add the gradients of one part, which is on the device, to those of the others; its losses.

        `weights` by their names stand in for the network's own, and get the gradients.
        """
        with autocast(self.dist.device, self.dtype):
            found = (
                functional_call(self.parallel_objective, weights, (batch, draws))
                if weights
                else self.parallel_objective(batch, draws)
            )
        share = sum(loss.total / counts[name] for name, loss in found.items())
        assert isinstance(share, Tensor)
        # Several processes average their gradients; what is wanted is the sum.
        (share * self.dist.world_size * (self.scaler.scale if self.scaler else 1.0)).backward()
        return {name: Loss(*(each.detach() for each in loss)) for name, loss in found.items()}

    def step(self) -> Tensor:
        """One step of the optimizer, or none where the gradient is not finite; the length that it had."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.scaler:
            torch._foreach_div_([p.grad for p in parameters if p.grad is not None], self.scaler.scale)
        norm = clip_grad_norm(parameters, self.settings.grad_clip)
        # The fused optimizer leaves everything as it is where this is 1, without asking the device first.
        finite = norm.isfinite()
        self.optimizer.found_inf = (~finite).float().reshape(())  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler:
            self.scaler.learn(bool(finite))
        return norm

    def counts(self, batches: tuple[Batch, ...]) -> dict[str, float]:
        """Items of each loss in the global batch."""
        own = [self.objective.counts(batch) for batch in batches]
        total = self.dist.sum(torch.tensor([list(each.values()) for each in own], dtype=torch.float64).sum(0))
        return {name: max(1.0, count) for name, count in zip(own[0], total.tolist(), strict=True)}

    def _last_part(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Processes exchange gradients after the last part only."""
        if self.dist.world_size == 1:
            return contextlib.nullcontext()
        if isinstance(self.parallel_objective, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext() if last else self.parallel_objective.no_sync()
        self.parallel_objective.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()
