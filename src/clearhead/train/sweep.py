"""A sweep over learning rates and seeds: one run each, and a table of means and standard deviations."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.checkpoint import load_model, save_model
from clearhead.config.recipe import Recipe
from clearhead.errors import UserError
from clearhead.files import read_text, write_text
from clearhead.train.loop import train
from clearhead.train.run_folder import check_folder
from clearhead.train.run_log import number, read_log
from clearhead.train.signals import Stopped
from clearhead.train.state import Log, OnEvent
from clearhead.train.validate import better

Table = list[dict[str, Any]]


def sweep(
    recipe: Recipe, out: Path, lrs: Sequence[float], seeds: int, resume: bool, log: Log, on_event: OnEvent
) -> Table | None:
    """Train every learning rate with `seeds` seeds, from the recipe's on, each run in its own folder below `out`.

    Writes `table.md` and `table.json`, and copies the best model of the learning rate with the best mean to `out`/best.
    With `resume`, finished runs are kept. Raises `Stopped` after a signal; all processes but the first return None.
    """
    if not (recipe.data.valid or recipe.data.held_out):
        raise UserError("--seeds, --lrs: there is no validation data to compare by; add data.valid or data.held_out")
    check_folder(out, resume, ("lr-*",))
    metric, results = recipe.train.metric, dict[float, list[dict[str, float]]]()
    for lr in lrs:
        for seed in range(recipe.train.seed, recipe.train.seed + seeds):
            folder = run_folder(out, lr, seed)
            if not _finished(folder):
                log(f"lr {lr:g}, seed {seed}:")
                settings = recipe.train.model_copy(update={"lr": lr, "seed": seed})
                changed = recipe.model_copy(update={"train": settings})
                summary = train(changed, folder, resume=resume and folder.exists(), log=log, on_event=on_event)
                if summary.stopped:
                    raise Stopped(summary.signal)
            results.setdefault(lr, []).append(_best_validation(folder, metric))
    if int(os.environ.get("RANK", 0)):  # the first process writes for all
        return None
    table = [_line(lr, metric, runs) for lr, runs in results.items()]
    best = table[0]
    for line in table[1:]:
        best = line if better(metric, line[metric], best[metric]) else best
    for line in table:
        line["best"] = line is best
    _copy_best_model(out, best["lr"], metric, results[best["lr"]], recipe.train.seed)
    write_text(out / "table.json", json.dumps(table, indent=2) + "\n")
    write_text(out / "table.md", "\n".join(lines(table, metric)) + "\n")
    return table


def run_folder(out: Path, lr: float, seed: int) -> Path:
    """Return the folder of the run with a learning rate and a seed."""
    return out / f"lr-{lr:g}-seed-{seed}"


def lines(table: Table, metric: str) -> list[str]:
    """Return the table as Markdown: mean and sample standard deviation of the metric, and its value for each seed."""
    head = [
        "| lr | seeds | mean " + metric + " | std | per seed | |",
        "| ---: | ---: | ---: | ---: | --- | --- |",
    ]
    rows = [
        f"| {line['lr']:g} | {line['seeds']} | {line[metric]:.4g} | {line['std']:.2g} | "
        f"{', '.join(f'{value:.4g}' for value in line['values'])} | {'best' if line['best'] else ''} |"
        for line in table
    ]
    return head + rows


def _finished(folder: Path) -> bool:
    path = folder / "log.jsonl"
    end = read_log(path)[-1:] if path.exists() else []
    return bool(end) and end[0]["kind"] == "end" and str(end[0].get("reason")) != "stopped"


def _best_validation(folder: Path, metric: str) -> dict[str, float]:
    """All numbers of the run's best validation."""
    best: dict[str, Any] = {}
    for line in read_log(folder / "log.jsonl"):
        value = number(line.get(metric)) if line["kind"] == "validation" else None
        if value is not None and better(metric, value, best.get(metric)):
            best = line
    if not best:
        raise UserError(f"{folder}: no validation has a finite {metric}; lower train.validate_every or train.lr")
    return {name: value for name, value in best.items() if number(value) is not None}


def _line(lr: float, metric: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    values = [run[metric] for run in runs]
    means = {name: statistics.fmean(run[name] for run in runs) for name in runs[0] if all(name in r for r in runs)}
    return {
        "lr": lr,
        "seeds": len(runs),
        metric: means[metric],
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "values": values,
        "means": means,
    }


def _copy_best_model(out: Path, lr: float, metric: str, runs: list[dict[str, float]], first_seed: int) -> None:
    """Copy the best seed's model to `out`/best, so that the sweep's folder can be used like a run's."""
    best = 0
    for index, run in enumerate(runs):
        best = index if better(metric, run[metric], runs[best][metric]) else best
    folder = run_folder(out, lr, first_seed + best) / "best"
    loaded = load_model(folder)
    save_model(out / "best", loaded.network, loaded.tokenizers, loaded.extra, read_text(folder / "README.md"))
