"""The run folder: refused if it holds something else, locked while training, closed at the end."""

from __future__ import annotations

import gc
from pathlib import Path

from clearhead.checkpoint import run_lock
from clearhead.config.recipe import dump_recipe
from clearhead.errors import UserError
from clearhead.files import check_utf8_name, write_text
from clearhead.model.cost import count_parameters
from clearhead.train.events import write_event
from clearhead.train.run_info import data_facts, machine
from clearhead.train.run_log import RunLog
from clearhead.train.state import Event, RunState


def check_folder(out: Path, resume: bool, run_files: tuple[str, ...]) -> None:
    """Refuse a folder that is not empty and not a run (no `run_files`), or that is a run and not to be resumed."""
    check_utf8_name(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    is_run = any(any(out.glob(name)) for name in run_files)
    if not is_run:
        raise UserError(f"{out} exists already and is not a run; choose another --out")
    if not resume:
        raise UserError(f"{out} exists already; continue with --resume, or choose another --out")


def lock_folder(run: RunState) -> None:
    """Lock the folder against other processes until `close`."""
    if run.dist.is_main and not run.locked:
        run.lock.enter_context(run_lock(run.out))
        run.locked = True


def open_folder(run: RunState, after: int) -> None:
    """Create the run folder after the first step, or reopen it on resume, and log the start.

    Log lines later than step `after` are removed: they belong to steps lost in a crash.
    """
    run.run_log = RunLog(run.out)
    if not run.dist.is_main:
        return
    lock_folder(run)
    run.run_log.rewind(after, run.validation_pending)
    write_text(run.out / "recipe.yaml", dump_recipe(run.recipe))
    facts: Event = {"parameters": count_parameters(run.network), "steps": run.settings.steps, **machine(run.dist)}
    trainable = sum(p.numel() for p in run.network.parameters() if p.requires_grad)
    if trainable < facts["parameters"]:
        facts["trainable_parameters"] = trainable
    facts |= {"metric": run.settings.metric, **data_facts(run.data, run.recipe.data.max_length)}
    for name in ("truncated", "left_out"):
        if name in facts:
            run.log(facts[name])
    write_event(run, {"kind": "start", "step": max(after, 0), **facts})


def close(run: RunState) -> None:
    """Close the log, release the lock, and free DDP's process group."""
    if run.dist.world_size > 1:
        run.updater.parallel_objective = run.objective
        gc.collect()  # a DDP module that outlives the process group may wait for it forever
    if run.run_log is not None:
        run.run_log.close()
    run.lock.close()
