"""The HTML report of a sweep: a table of its recipes, best first, and the curves of the best ones on common axes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from clearhead.config.grid import short_names, value_text
from clearhead.files import write_text
from clearhead.train.report_chart import MAX_POINTS, Bin, Curve, chart
from clearhead.train.report_page import NAMES, cut, heading, page, section, show
from clearhead.train.run_log import Kind, Points, read_log, series

MAX_CURVES = 8  # recipes whose curves are drawn, one color each
CHARTS: tuple[tuple[str, Kind, str], ...] = (
    ("Validation loss", "validation", "loss"),
    ("Training loss", "step", "loss"),
    ("Speed", "step", "tokens_per_second"),
)
Table = Sequence[dict[str, Any]]


def write_sweep_report(out: Path, table: Table, metric: str) -> Path:
    """Write OUT/report.html from the table and the logs of the runs."""
    path = out / "report.html"
    write_text(path, sweep_report(out, table, metric))
    return path


def sweep_report(out: Path, table: Table, metric: str) -> str:
    """Return the report as HTML; `table` is best first."""
    title, runs = escape(out.resolve().name), sum(len(row["runs"]) for row in table)
    summary = f"{len(table):,} recipes, {runs:,} runs, compared by {heading(metric)} of the best validation"
    first: tuple[str, Kind, str] = (f"Validation {NAMES.get(metric, metric)}", "validation", metric)
    charts = [first, *(each for each in CHARTS if each[1:] != first[1:])]
    logs = [[read_log(out / name / "log.jsonl") for name in row["runs"]] for row in table[:MAX_CURVES]]
    names = [_name(row) for row in table]
    unit, figures = "mean and range over the seeds" if table[0]["seeds"] > 1 else "", list[str]()
    for chart_title, kind, key in charts:
        points = [[series(log, kind)[key] for log in of_seeds] for of_seeds in logs]
        curves = [Curve(name, over_seeds(each), n) for n, (name, each) in enumerate(zip(names, points, strict=False))]
        figures.append(chart(chart_title, unit, curves, key))
    more = f"<p>Curves of the best {MAX_CURVES} of {len(table):,} recipes.</p>" if len(table) > MAX_CURVES else ""
    parts = (
        f"<header><h1>{title}</h1><p>{summary}</p></header>",
        f'<table class="runs">{"".join(_rows(table, metric))}</table>',
        section("Curves", more + f'<div class="grid">{"".join(figures)}</div>'),
    )
    return page(title, parts)


def over_seeds(runs: Sequence[Points]) -> list[Bin | None]:
    """The mean, minimum and maximum over runs at every step that all of them have logged."""
    values: dict[float, list[float]] = defaultdict(list)
    for points in runs:
        for step, value in points:
            if value is not None:
                values[step].append(value)
    common = sorted(step for step, of_runs in values.items() if len(of_runs) == len(runs))
    size, bins = max(1, math.ceil(len(common) / MAX_POINTS)), list[Bin | None]()
    for start in range(0, len(common), size):
        steps = common[start : start + size]
        inside = [value for step in steps for value in values[step]]
        bins.append(Bin(steps[0], steps[-1], math.fsum(inside) / len(inside), min(inside), max(inside)))
    return bins


def _rows(table: Table, metric: str) -> Iterator[str]:
    names = short_names(list(table[0]["settings"]))
    head = ["", *names.values(), f"{heading(metric)}, mean ± std", *_others(table, metric), "runs"]
    yield f"<tr>{''.join(f'<th>{cut(name)}' for name in head)}"
    for index, row in enumerate(table):
        diverged = row[metric] is None
        score = "diverged" if diverged else show(row[metric], metric)
        score += f" ± {show(row['std'], metric)}" if not diverged and row["seeds"] > 1 else ""
        links = (
            f'<a href="{quote(name)}/report.html">{"diverged" if value is None else show(value, metric)}</a>'
            for name, value in zip(row["runs"], row["values"], strict=True)
        )
        cells = [
            f'<i class="c{index}"></i>{index + 1}' if index < MAX_CURVES else f"{index + 1}",
            *(cut(value_text(value)) for value in row["settings"].values()),
            f"<b>{score}</b>",
            *(show(row["means"][key], key) if key in row["means"] else "" for key in _others(table, metric)),
            ", ".join(links),
        ]
        yield f"<tr>{''.join(f'<td>{cell}' for cell in cells)}"


def _others(table: Table, metric: str) -> list[str]:
    """Other numbers worth a column."""
    return [key for key in ("loss", "accuracy", "bleu", "f1") if key != metric and key in table[0]["means"]]


def _name(row: dict[str, Any]) -> str:
    names = short_names(list(row["settings"]))
    values = (f"{names[key]} {value_text(value)}" for key, value in row["settings"].items())
    return escape(", ".join(values) or "all seeds")
