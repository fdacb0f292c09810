"""Events of a run: written to the log and shown to the user; the log line of training metrics."""

from __future__ import annotations

import time

import torch

from clearhead.train.lr_schedule import lr_at_step
from clearhead.train.run_info import mfu
from clearhead.train.state import Event, RunState
from clearhead.train.updater import Metrics


def write_event(run: RunState, event: Event) -> None:
    """Write an event to the log and show it; main process only."""
    if not run.dist.is_main:
        return
    if run.run_log is not None:
        run.run_log.write(**event)
    run.on_event(event)


def log_step(run: RunState) -> None:
    """Log the metrics since the last log line."""
    assert run.batch is not None
    assert run.grad_norm is not None
    now = time.perf_counter()
    tokens = float(run.dist.sum(torch.tensor([float(run.metrics.tokens)], dtype=torch.float64))[0])
    tokens_per_second = tokens / max(now - run.log_time, 1e-9)
    event: Event = {
        "kind": "step",
        "step": run.step,
        "epoch": run.batch.plan.epoch,
        **run.metrics.means(run.dist),
        "lr": lr_at_step(run.settings, run.step, run.settings.steps),
        "grad_norm": float(run.grad_norm),
        "tokens_per_second": tokens_per_second,
        "seconds": time.perf_counter() - run.start_time,
    }
    if utilization := mfu(run.network, run.recipe.data.max_length, tokens_per_second, run.dist):
        event["mfu"] = utilization
    write_event(run, event)
    run.metrics, run.log_time = Metrics(), time.perf_counter()
