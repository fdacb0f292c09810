"""The training loop for every family and task: load, step, log, validate, save."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from clearhead.config.recipe import Recipe
from clearhead.data import GlobalBatch
from clearhead.errors import UserError
from clearhead.train.alignment import store_alignment
from clearhead.train.checkpointing import (
    FINISHED,
    average_checkpoints,
    resume_run,
    save_checkpoint,
    save_model_folder,
)
from clearhead.train.distributed import dist_context
from clearhead.train.events import log_step, write_event
from clearhead.train.finite import check_finite
from clearhead.train.oom import split_batches
from clearhead.train.report import write_report
from clearhead.train.run_folder import check_folder, close, open_folder
from clearhead.train.signals import StopSignal
from clearhead.train.state import Log, OnEvent, RunState, global_batches, setup
from clearhead.train.validate import validate


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    step: int
    steps: int
    best: float | None
    signal: int  # that stopped the run; 0: all steps are done, or patience has run out
    is_main: bool = True  # whether this is the main process

    @property
    def stopped(self) -> bool:
        """Whether a signal stopped the run."""
        return self.signal != 0


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    log: Log = lambda line: None,
    on_event: OnEvent = lambda event: None,
) -> Summary:
    """Train by a recipe into the run folder `out`.

    `log` receives status messages, `on_event` every event of the run log. With `resume`, the run in `out` continues
    from its newest intact checkpoint, or starts where there is none.
    """
    check_folder(out, resume, (".lock", "recipe.yaml", "checkpoints"))
    settings = recipe.train
    # Signals are handled in Python, so they would wait while a process that has not come is waited for.
    with dist_context(settings.device) as dist, StopSignal() as stop:
        try:
            run = setup(recipe, out, dist, log, on_event)
        except KeyboardInterrupt:
            return Summary(0, settings.steps, None, stop.signal or signal.SIGINT, dist.is_main)
        stop.finish_step = True
        try:
            if resume:
                resume_run(run)
            if run.validation_pending:
                validate(run, stop)
            batches = global_batches(run)
            while not run.done and not dist.any(bool(stop)):
                if not train_step(run, next(batches)):
                    batches = global_batches(run)  # out of memory: the same batch again, in more micro-batches
                    continue
                if run.due(settings.log_every):
                    log_step(run)
                if run.due(settings.validate_every):
                    validate(run, stop)
                if run.due(settings.save_every):
                    save_checkpoint(run)
            stopped = dist.any(bool(stop))
            finish(run, stopped)
        finally:
            close(run)
    number = (stop.signal or signal.SIGTERM) if stopped else 0  # another process may have received it
    return Summary(run.step, settings.steps, run.best, number, dist.is_main)


def train_step(run: RunState, batch: GlobalBatch) -> bool:
    """Make one update; False if memory ran out and the batch has to be repeated in more micro-batches."""
    try:
        grad_norm = run.update(batch.batches, run.step + 1, run.metrics)
    except torch.OutOfMemoryError:
        split_batches(run, batch)
        return False
    run.step, run.position, run.batch, run.grad_norm = run.step + 1, batch.next_position, batch, grad_norm
    if run.run_log is None:
        open_folder(run, after=-1)
    # Reading a GPU tensor is a sync, so there a norm is checked once the next step is queued.
    run.unchecked.append((run.step, grad_norm, batch))
    check_finite(run, skip_last=0 if run.dist.device.type == "cpu" else 1)
    return True


def finish(run: RunState, stopped: bool) -> None:
    """Save the last checkpoint, the last model and the report; a stopped run will resume, so it is not averaged."""
    if not run.step:
        return
    if run.saved_step < run.step:
        save_checkpoint(run)
    if run.settings.average_checkpoints > 1 and not stopped:
        average_checkpoints(run)
        validate(run)
    save_model_folder(run, "last")
    if stopped:
        reason = "stopped"
    elif run.step >= run.settings.steps:
        reason = FINISHED
    else:
        reason = f"{run.settings.metric} has not improved for {run.validations_since_best} validations"
    if not stopped:
        store_alignment(run)
    write_event(run, {"kind": "end", "step": run.step, "best": run.best, "reason": reason})
    if run.dist.is_main:
        try:
            write_report(run.out)
        except UserError as error:  # everything else is saved
            run.log(str(error))
