"""The progress of a run as its checkpoints store it: typed and bounded, since a checkpoint may come from anyone."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field

from clearhead.config.settings import Settings
from clearhead.data import Position
from clearhead.errors import UserError
from clearhead.train.resume_check import comparable, vocabulary
from clearhead.train.run_log import number
from clearhead.train.state import RunState
from clearhead.train.updater import MAX_LOSS_SCALE

Count = Annotated[int, Field(ge=0, le=1 << 40)]
Scale = Annotated[float, Field(ge=1, le=MAX_LOSS_SCALE)]
Name = Annotated[str, Field(max_length=100)]
# JSON has no tuples, so these are built from lists; their items are strict.
Sums = Annotated[tuple[float | None, float | None, float | None], Field(strict=False)]


class Progress(Settings):
    """What the rest of a run depends on, besides its tensors."""

    position: Annotated[tuple[Count, Count, Count], Field(strict=False)]  # epoch, bucket, batch
    metrics: dict[Name, Sums]  # loss name → (unsmoothed, count, correct) since the last log line; None: not finite
    best: float | None
    validations_since_best: Count
    validation_pending: bool
    grad_accum_factor: int = Field(ge=1, le=1 << 20)  # more than 1 after running out of memory
    scaler: Annotated[tuple[Scale, Count], Field(strict=False)] | None
    recipe: dict[str, Any]  # compared with the recipe of the resumed run
    vocabulary: Name  # likewise, a digest
    extra_checkpoint: Count | None  # step of a checkpoint to delete after the next save


def progress_of(run: RunState, metrics: dict[str, list[float]]) -> Progress:
    """Return the progress of a run; `metrics` are the totals over all processes."""
    scaler = run.updater.scaler
    return Progress(
        position=run.position,
        metrics={name: (number(a), number(b), number(c)) for name, (a, b, c) in metrics.items()},
        best=run.best,
        validations_since_best=run.validations_since_best,
        validation_pending=run.validation_pending,
        grad_accum_factor=run.grad_accum // run.settings.grad_accum,
        scaler=(scaler.scale, scaler.steps) if scaler else None,
        recipe=comparable(run.recipe),
        vocabulary=vocabulary(run.data),
        extra_checkpoint=run.extra_checkpoint,
    )


def restore_progress(run: RunState, saved: Progress, step: int, where: str) -> None:
    """Set a run to the progress of the checkpoint at `step`; refuse what a run could not have reached."""
    grad_accum = run.settings.grad_accum * saved.grad_accum_factor
    if saved.grad_accum_factor > 1 and grad_accum >= 2 * run.recipe.data.batch_tokens:
        raise UserError(f"{where}: {grad_accum:,} micro-batches, more than a batch has tokens; lower train.grad_accum")
    if unknown := saved.metrics.keys() - set(run.objective.loss_names):
        raise UserError(f"{where}: metrics: {min(unknown)!r} is not a loss of this task; the state is not of this run")
    if (saved.extra_checkpoint or 0) > step:
        raise UserError(f"{where}: extra_checkpoint: {saved.extra_checkpoint} is later than step {step}")
    run.step = run.saved_step = step
    run.position = Position(*saved.position)
    run.best, run.validations_since_best = saved.best, saved.validations_since_best
    run.validation_pending = saved.validation_pending
    run.extra_checkpoint = saved.extra_checkpoint if run.due(run.settings.save_every) else step
    run.grad_accum = grad_accum
    if run.dist.is_main:
        for name, sums in saved.metrics.items():
            values = [math.nan if value is None else value for value in sums]
            run.metrics.sums[name] = torch.tensor(values, dtype=torch.float64, device=run.dist.device)
    if run.updater.scaler is not None and saved.scaler is not None:
        run.updater.scaler.scale, run.updater.scaler.steps = saved.scaler
