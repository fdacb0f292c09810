"""The HTML report of a run: headline numbers, curves, samples, notes, recipe; one self-contained file."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from clearhead.files import read_text, write_text
from clearhead.train.report_chart import Curve, chart, downsample
from clearhead.train.report_page import NAMES, cut, duration, fold, heading, page, section, short, show, tile
from clearhead.train.report_texts import attention, confusion, mistakes, notes, samples
from clearhead.train.run_log import Line, Points, Series, elapsed, number, read_log, series

Chart = tuple[str, str, tuple[str, ...]]  # title, unit, numbers in the log

CHARTS: tuple[Chart, ...] = (
    ("Loss", "nats", ("loss",)),
    ("Accuracy", "fraction correct", ("accuracy",)),
    ("BLEU and chrF", "points of 100", ("bleu", "chrf")),
    ("Learning rate", "", ("lr",)),
    ("Gradient norm", "before clipping", ("grad_norm",)),
    ("Speed", "tokens per second", ("tokens_per_second",)),
)
NOT_CHARTED = ("epoch", "seconds", "perplexity", "mfu")  # shown in the tiles
METRICS = ("bleu", "chrf", "f1", "exact", "matthews", "spearman", "pearson", "accuracy")  # most common first
MAX_TILES = 3  # of metrics


def write_report(run: Path) -> Path:
    """Write RUN/report.html from RUN/log.jsonl."""
    path = run / "report.html"
    write_text(path, report(run))
    return path


def report(run: Path) -> str:
    """Return the report as HTML with inline styles and SVG, without scripts."""
    lines = read_log(run / "log.jsonl")
    start = next((line for line in reversed(lines) if line["kind"] == "start"), {})
    validations = [line for line in lines if line["kind"] == "validation"]
    last: Line = validations[-1] if validations else {}
    numbers = series(lines, "step"), series(lines, "validation")
    title, recipe = escape(run.resolve().name), run / "recipe.yaml"
    facts = "".join(f"<tr><th>{heading(key)}<td>{cut(value)}" for key, value in start.items() if key != "kind")
    metric = str(start.get("metric", "loss"))
    parts = (
        f"<header><h1>{title}</h1><p>{_summary(lines, start)}</p>{_left_out(start)}</header>",
        f'<div class="tiles">{"".join(_tiles(lines, *numbers, start, metric))}</div>',
        f'<div class="grid">{"".join(_charts(lines, *numbers, metric))}</div>',
        section("Measured once", _single_values(numbers[1])),
        section("Worst mistakes", mistakes(last)),
        section("Samples", samples(validations)),
        section("Attention", attention(last.get("attention"))),
        section("Confusion", confusion(last.get("confusion"))),
        section("Notes", notes(lines)),
        fold("Environment", f"<table>{facts}</table>" if facts else ""),
        fold("Resolved recipe", f"<pre>{escape(read_text(recipe))}</pre>" if recipe.is_file() else ""),
    )
    return page(title, parts)


def _summary(lines: Sequence[Line], start: Line) -> str:
    if not lines:
        return "Nothing has been logged yet."
    parameters = number(start.get("parameters"))
    end = next((line for line in lines if line["kind"] == "end"), None)
    parts = (
        f"recipe {start['recipe']}" if start.get("recipe") else "",
        f"{short(parameters)} parameters" if parameters else "",
        "not finished" if end is None else str(end.get("reason") or "finished"),
    )
    return escape(" · ".join(filter(None, parts)))


def _left_out(start: Line) -> str:
    """What the settings did to the data, if anything: truncated texts, records that were left out."""
    facts = (str(start[key]) for key in ("truncated", "left_out") if start.get(key))
    return "".join(f"<p>{cut(fact)}</p>" for fact in facts)


def _tiles(lines: Sequence[Line], training: Series, validation: Series, start: Line, metric: str) -> Iterator[str]:
    """Headline numbers: the metric that chose the model, other metrics, steps, speed, time."""
    logged = (line["signature"] for line in reversed(lines) if isinstance(line.get("signature"), dict))
    signatures: dict[str, Any] = next(logged, {})
    metrics = [key for key in dict.fromkeys((metric, "loss", *METRICS)) if _known(validation[key])][:MAX_TILES]
    for key in metrics:
        best = (max if key in METRICS else min)(_known(validation[key]))
        step = next(step for step, value in validation[key] if value == best)
        perplexity = dict(validation["perplexity"]).get(step) if key == "loss" else None
        details = [f"at step {step:,.0f}", f"perplexity {show(perplexity)}" if perplexity else ""]
        details.append("chose the best model" if key == metric else "")
        name = "validation loss" if key == "loss" else NAMES.get(key, cut(key))
        yield tile(f"Best {name}", show(best, key), details, signatures.get(key, ""))
    if not metrics and (losses := _known(training["loss"])):
        yield tile("Training loss", show(losses[-1]), ["no validation yet"])
    if steps := [value for line in lines if (value := number(line.get("step"))) is not None]:
        total, epochs = number(start.get("steps")), _known(training["epoch"])
        details = [f"of {total:,.0f}" if total else "", f"epoch {show(epochs[-1])}" if epochs else ""]
        yield tile("Steps", f"{max(steps):,.0f}", details)
    if speeds := _known(training["tokens_per_second"]):
        mfu = _known(training["mfu"])
        details = [f"{statistics.median(mfu):.0%} MFU" if mfu else ""]
        yield tile("Tokens per second", show(statistics.median(speeds)), details)
    if seconds := elapsed(lines):
        yield tile("Time", duration(seconds), [])


def _charts(lines: Sequence[Line], training: Series, validation: Series, metric: str) -> Iterator[str]:
    """One chart per number in the log, the metric that chose the model first, then the common ones."""
    kinds = {"training": training, "validation": validation}
    known = {key for _, _, keys in CHARTS for key in keys} | {*NOT_CHARTED}
    others = dict.fromkeys(key for numbers in kinds.values() for key in numbers if key not in known)
    charts: list[Chart] = [*CHARTS, *((heading(key), "", (key,)) for key in others)]
    for title, unit, keys in sorted(charts, key=lambda each: metric not in each[2]):
        curves = [
            Curve(kind if len(keys) == 1 else NAMES[key], downsample(kinds[kind][key]))
            for key in keys
            for kind in kinds
        ]
        yield chart(title, unit, curves, keys[0])
    exposure: Line = next((line["exposure"] for line in reversed(lines) if isinstance(line.get("exposure"), dict)), {})
    curves = [
        Curve(name, downsample([(position, number(value)) for position, value in enumerate(exposure[key], start=1)]))
        for key, name in (("teacher_forced", "teacher forcing"), ("free_running", "free-running"))
        if isinstance(exposure.get(key), list)
    ]
    yield chart("Accuracy by position", "in the target", curves, "accuracy", "position")


def _single_values(validation: Series) -> str:
    """The numbers of a run with one validation, of which there is no curve."""
    rows = [
        f"<tr><th>{heading(key)}<td>{show(value, key)} at step {step:,.0f}"
        for key, points in validation.items()
        if key not in NOT_CHARTED and len(known := [point for point in points if point[1] is not None]) == 1
        for step, value in known
        if value is not None
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _known(points: Points) -> list[float]:
    return [value for _, value in points if value is not None]
