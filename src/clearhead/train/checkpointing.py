"""Checkpoints of a run: save, resume, average, and model folders."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from clearhead.checkpoint import (
    average_weights,
    build_with_weights,
    checkpoint_folder,
    checkpoint_folders,
    delete_checkpoint,
    gather_state,
    gather_weights,
    load_state,
    load_weights,
    newest_checkpoint,
    save_model,
    write_checkpoint,
)
from clearhead.errors import UserError
from clearhead.train.events import write_event
from clearhead.train.finite import check_finite
from clearhead.train.progress import Progress, progress_of, restore_progress
from clearhead.train.resume_check import check_same_settings, comparable, vocabulary
from clearhead.train.run_folder import lock_folder, open_folder
from clearhead.train.run_info import model_card_of_run
from clearhead.train.run_log import read_log
from clearhead.train.state import RunState

FINISHED = "finished"  # the end reason of a run that did all its steps


def save_checkpoint(run: RunState) -> None:
    """Save everything that the rest of the run depends on."""
    check_finite(run)
    weights, optimizer_state = gather_state(run.network, run.updater.optimizer)
    metrics = run.metrics.totals(run.dist)
    if run.dist.is_main:
        progress = progress_of(run, metrics).model_dump(mode="json")
        extra = None if run.extra_checkpoint is None else checkpoint_folder(run.out, run.extra_checkpoint)
        has_extra = extra is not None and extra.exists()
        # Keep as many regular checkpoints as a run that was never stopped.
        keep = run.settings.keep_checkpoints + has_extra + (not run.due(run.settings.save_every))
        write_checkpoint(run.out, run.step, weights, optimizer_state, progress, keep)
        if extra is not None and extra.exists():
            delete_checkpoint(extra)
    run.dist.barrier()
    run.saved_step = run.step


def save_model_folder(run: RunState, name: str) -> None:
    """Save the network as a model folder in the run folder."""
    weights = gather_weights(run.network)
    if not run.dist.is_main:
        return
    if run.lora is not None:
        save_adapter(run, name, weights)
        weights = run.lora.merge(weights)
    network = build_with_weights(run.network.config, weights)
    config = run.recipe.data
    settings = config.model_dump(mode="json")
    extra = run.inherited | {"task": config.task, "labels": list(run.data.labels), "step": run.step, "data": settings}
    validation = run.validation if run.validation.get("step") == run.step else {}
    card = model_card_of_run(run.out.name, run.recipe, run.step, validation)
    save_model(run.out / name, network, run.data.tokenizers, extra, card)


def save_adapter(run: RunState, name: str, weights: Mapping[str, Tensor]) -> None:
    """Save the adapter beside the model, where the architecture is one of transformers."""
    assert run.lora is not None
    try:
        run.lora.save(run.out / f"{name}-adapter", run.network.config, weights)
    except UserError as error:
        run.log(f"the adapter is saved only in the model: {error}")


def resume_run(run: RunState) -> None:
    """Continue from the newest intact checkpoint, if there is one; refuse if the recipe or vocabulary changed."""
    if not (run.out / "checkpoints").is_dir():
        return
    lock_folder(run)
    run.dist.barrier()
    state, damaged = newest_checkpoint(run.out)
    for line in damaged:
        run.log(f"{line}; trying the previous checkpoint")
    if state is None:
        if damaged:
            raise UserError(f"{run.out}: no checkpoint is intact; start again in another folder")
        return
    where, total = f"{state.folder / 'state.json'}: progress", run.settings.steps
    saved = Progress.build(state.progress, where=where)
    check_same_settings(run.out, saved.recipe, comparable(run.recipe))
    if saved.vocabulary != vocabulary(run.data):
        raise UserError(f"{run.out}: the vocabulary is not the one this run started with; restore the data")
    if state.step > total or (state.step == total and _finished(run)):
        raise UserError(f"train.steps: {total} is the total, and {run.out} is at {state.step}; raise it")
    restore_progress(run, saved, state.step, where)
    load_state(run.network, run.updater.optimizer, state.weights(), state.optimizer())
    run.log(f"resuming from step {state.step} of {total}")
    open_folder(run, after=run.step)


def _finished(run: RunState) -> bool:
    """Whether the run in the folder did all its steps and saved its last model."""
    path = run.out / "log.jsonl"
    lines = read_log(path) if path.exists() else []
    return bool(lines) and lines[-1].get("reason") == FINISHED


def average_checkpoints(run: RunState) -> None:
    """Load the mean of the newest checkpoints into the network."""
    # A later checkpoint was damaged when the run resumed from an earlier one.
    folders = [path for step, path in checkpoint_folders(run.out) if step <= run.step]
    paths = folders[: run.settings.average_checkpoints][::-1]
    load_weights(run.network, average_weights(paths))
    text = f"the last model is the mean of {len(paths)} checkpoints"
    write_event(run, {"kind": "note", "step": run.step, "text": text, "average": len(paths)})
