"""The same recipe at several rates and with several seeds: a run each, and a table of means and spreads."""

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
from clearhead.train.loop import check_folder, train
from clearhead.train.run import Say, Watch
from clearhead.train.run_log import number, read_log
from clearhead.train.validate import better

Table = list[dict[str, Any]]


def sweep(
    recipe: Recipe, out: Path, rates: Sequence[float], seeds: int, resume: bool, say: Say, watch: Watch
) -> Table | None:
    """Train every rate with every seed from the recipe's on, each in a folder of its own below `out`.

    Writes `table.md` and `table.json`, and copies the best model of the rate with the best mean to `out`/best. With
    `resume`, runs that are done stay as they are. None when somebody asked to stop, and for any process but the first.
    """
    if not (recipe.data.valid or recipe.data.held_out):
        raise UserError("--seeds, --rates: there is no validation data to compare by; add data.valid or data.held_out")
    check_folder(out, resume, ("rate-*",))
    metric, scores = recipe.train.metric, dict[float, list[dict[str, float]]]()
    for rate in rates:
        for seed in range(recipe.train.seed, recipe.train.seed + seeds):
            folder = run_folder(out, rate, seed)
            if not _done(folder):
                say(f"rate {rate:g}, seed {seed}:")
                changes = recipe.train.model_copy(update={"lr": rate, "seed": seed})
                again = resume and folder.exists()
                if train(
                    recipe.model_copy(update={"train": changes}), folder, resume=again, say=say, watch=watch
                ).stopped:
                    return None
            scores.setdefault(rate, []).append(_best(folder, metric))
    if int(os.environ.get("RANK", 0)):  # of several processes, the first speaks for all
        return None
    table = [_line(rate, metric, found) for rate, found in scores.items()]
    best = table[0]
    for line in table[1:]:
        best = line if better(metric, line[metric], best[metric]) else best
    for line in table:
        line["best"] = line is best
    _keep(out, best["lr"], metric, scores[best["lr"]], recipe.train.seed)
    write_text(out / "table.json", json.dumps(table, indent=2) + "\n")
    write_text(out / "table.md", "\n".join(lines(table, metric)) + "\n")
    return table


def run_folder(out: Path, rate: float, seed: int) -> Path:
    """Where the run of a rate and a seed lies."""
    return out / f"rate-{rate:g}-seed-{seed}"


def lines(table: Table, metric: str) -> list[str]:
    """The table as Markdown: mean and spread (the standard deviation of a sample) of the metric, and its values."""
    head = [
        "| rate | seeds | mean " + metric + " | spread | of each seed | |",
        "| ---: | ---: | ---: | ---: | --- | --- |",
    ]
    rows = [
        f"| {line['rate']:g} | {line['seeds']} | {line[metric]:.4g} | {line['spread']:.2g} | "
        f"{', '.join(f'{value:.4g}' for value in line['values'])} | {'best' if line['best'] else ''} |"
        for line in table
    ]
    return head + rows


def _done(folder: Path) -> bool:
    path = folder / "log.jsonl"
    end = read_log(path)[-1:] if path.exists() else []
    return bool(end) and end[0]["kind"] == "end" and str(end[0].get("reason")) != "stopped"


def _best(folder: Path, metric: str) -> dict[str, float]:
    """All numbers of the validation that was the run's best."""
    found: dict[str, Any] = {}
    for line in read_log(folder / "log.jsonl"):
        value = number(line.get(metric)) if line["kind"] == "validation" else None
        if value is not None and better(metric, value, found.get(metric)):
            found = line
    if not found:
        raise UserError(f"{folder}: no validation gave a number for {metric}; lower train.validate_every or train.lr")
    return {name: value for name, value in found.items() if number(value) is not None}


def _line(rate: float, metric: str, found: list[dict[str, float]]) -> dict[str, Any]:
    values = [each[metric] for each in found]
    means = {name: statistics.fmean(each[name] for each in found) for name in found[0] if all(name in e for e in found)}
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "lr": rate,
        "seeds": len(found),
        metric: means[metric],
        "spread": spread,
        "values": values,
        "means": means,
    }


def _keep(out: Path, rate: float, metric: str, found: list[dict[str, float]], first: int) -> None:
    """The model of the best seed at this rate, so that the folder can be used as a run's."""
    seed = 0
    for place, each in enumerate(found):
        seed = place if better(metric, each[metric], found[seed][metric]) else seed
    folder = run_folder(out, rate, first + seed) / "best"
    loaded = load_model(folder)
    save_model(out / "best", loaded.network, loaded.tokenizers, loaded.extra, read_text(folder / "README.md"))
