"""A sweep over a grid of recipes and seeds: one run each, a table of means and standard deviations, one report."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.checkpoint import load_model, save_model
from clearhead.config.grid import GridPoint, Values, point_name, short_names, value_text
from clearhead.config.recipe import Recipe, load_recipe
from clearhead.errors import UserError
from clearhead.files import read_text, write_text
from clearhead.train.finite import Diverged
from clearhead.train.init_from import fit_to_initial_model, load_initial_model
from clearhead.train.loop import train
from clearhead.train.resume_check import check_same_settings, comparable
from clearhead.train.run_folder import check_folder
from clearhead.train.run_log import number, read_log
from clearhead.train.signals import Stopped
from clearhead.train.state import Log, OnEvent
from clearhead.train.sweep_report import write_sweep_report
from clearhead.train.validate import better

Table = list[dict[str, Any]]


def sweep(grid: Sequence[GridPoint], seeds: int, out: Path, resume: bool, log: Log, on_event: OnEvent) -> Table | None:
    """Train every recipe of a grid with `seeds` seeds, from the recipe's on, each run in its own folder below `out`.

    Writes `table.md`, `table.json` and `report.html`, and copies the best model of the recipe with the best mean to
    `out`/best. With `resume`, finished runs are kept. Raises `Stopped` after a signal; all processes but the first
    return None.
    """
    if not all(recipe.data.valid or recipe.data.held_out for _, recipe in grid):
        raise UserError("a sweep compares by validation data, and there is none; add data.valid or data.held_out")
    check_folder(out, resume, ("*seed-*",))
    metric, runs = grid[0].recipe.train.metric, len(grid) * seeds
    log(f"sweep: recipes {len(grid):,}, seeds {seeds:,}, runs {runs:,}; compared by {metric}")
    table: Table = []
    for values, recipe in grid:
        first = recipe.train.seed
        folders = [run_folder(out, values, seed) for seed in range(first, first + seeds)]
        for seed, folder in enumerate(folders, start=first):
            changed = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
            if not _finished(folder, changed):
                log(f"{folder.name}:")
                try:
                    summary = train(changed, folder, resume=resume and folder.exists(), log=log, on_event=on_event)
                except Diverged as error:  # a result too
                    log(str(error))
                    continue
                if summary.stopped:
                    raise Stopped(summary.signal)
        table.append(_row(values, metric, folders))
    if int(os.environ.get("RANK", 0)):  # the first process writes for all
        return None
    table = ranked(table, metric)
    if table[0][metric] is None:
        raise UserError(f"{out}: no recipe has a finite {metric} with every seed; lower train.lr")
    _copy_best_model(out, table[0], metric)
    write_text(out / "table.json", json.dumps(table, indent=2) + "\n")
    write_text(out / "table.md", "\n".join(lines(table, metric)) + "\n")
    write_sweep_report(out, table, metric)
    return table


def run_folder(out: Path, values: Values, seed: int) -> Path:
    """Return the folder of the run with these values and a seed."""
    return out / f"{point_name(values)}seed-{seed}"


def ranked(table: Table, metric: str) -> Table:
    """Return the table best first; recipes of which a run has diverged come last."""
    sign = -1 if better(metric, 1, 0) else 1
    return sorted(table, key=lambda row: (row[metric] is None, sign * (row[metric] or 0)))


def lines(table: Table, metric: str) -> list[str]:
    """Return the table as Markdown, best first: mean and sample standard deviation, and the value of each seed."""
    names = short_names(list(table[0]["settings"]))
    head = [*names.values(), "seeds", f"{metric} (mean ± std)", "per seed"]
    rows = [
        [
            *map(value_text, row["settings"].values()),
            str(row["seeds"]),
            mean_and_std(row, metric),
            ", ".join("diverged" if value is None else f"{value:.4g}" for value in row["values"]),
        ]
        for row in table
    ]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---:"] * (len(head) - 1) + ["---"], *rows)]


def mean_and_std(row: dict[str, Any], metric: str) -> str:
    """Return the mean of the metric, and its standard deviation if there are several seeds."""
    if row[metric] is None:
        return "diverged"
    return f"{row[metric]:.4g}" + (f" ± {row['std']:.2g}" if row["seeds"] > 1 else "")


def _finished(folder: Path, recipe: Recipe | None = None) -> bool:
    """Return whether a run has ended, with all the steps of `recipe`; refuse one with other settings."""
    path = folder / "log.jsonl"
    end = read_log(path)[-1:] if path.exists() else []
    if not end or end[0]["kind"] != "end" or str(end[0].get("reason")) == "stopped":
        return False
    if recipe is None:
        return True
    trained = load_recipe(str(folder / "recipe.yaml"))
    recipe = fit_to_initial_model(recipe, load_initial_model(recipe))
    check_same_settings(folder, comparable(trained), comparable(recipe))
    return trained.train.steps >= recipe.train.steps


def _best_validation(folder: Path, metric: str) -> dict[str, float]:
    """All numbers of a finished run's best validation; empty if the run has diverged."""
    best: dict[str, Any] = {}
    for line in read_log(folder / "log.jsonl") if _finished(folder) else ():
        value = number(line.get(metric)) if line["kind"] == "validation" else None
        if value is not None and better(metric, value, best.get(metric)):
            best = line
    return {name: value for name, value in best.items() if number(value) is not None}


def _row(values: Values, metric: str, folders: Sequence[Path]) -> dict[str, Any]:
    """The line of the table for one recipe: its settings, and the best validations of its runs.

    The mean is null if a run has diverged.
    """
    runs = [_best_validation(folder, metric) for folder in folders]
    scores = [run.get(metric) for run in runs]
    means = {name: statistics.fmean(run[name] for run in runs) for name in runs[0] if all(name in r for r in runs)}
    finite = [score for score in scores if score is not None]
    return {
        "settings": dict(values),
        "seeds": len(runs),
        metric: means.get(metric),
        "std": statistics.stdev(finite) if len(finite) > 1 else 0.0,
        "values": scores,
        "means": means,
        "runs": [folder.name for folder in folders],
    }


def _copy_best_model(out: Path, row: dict[str, Any], metric: str) -> None:
    """Copy the best seed's model to `out`/best, so that the sweep's folder can be used like a run's."""
    best = 0
    for index, value in enumerate(row["values"]):
        best = index if better(metric, value, row["values"][best]) else best
    folder = out / row["runs"][best] / "best"
    loaded = load_model(folder)
    save_model(out / "best", loaded.network, loaded.tokenizers, loaded.extra, read_text(folder / "README.md"))
