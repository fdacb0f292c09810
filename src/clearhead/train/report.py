"""The HTML report of a run: headline numbers, curves, samples, notes, recipe; one self-contained file."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.files import read_text, write_text
from clearhead.train.run_log import Line, Points, Series, elapsed, number, read_log, series

CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Loss", "nats", ("loss",)),
    ("Accuracy", "fraction correct", ("accuracy",)),
    ("BLEU and chrF", "points of 100", ("bleu", "chrf")),
    ("Learning rate", "", ("lr",)),
    ("Gradient norm", "before clipping", ("grad_norm",)),
    ("Speed", "tokens per second", ("tokens_per_second",)),
)
NOT_CHARTED = ("epoch", "seconds", "perplexity", "mfu")  # shown in the tiles
LOG_SCALE = ("loss", "grad_norm")  # logarithmic axis if the values range over decades
METRICS = ("bleu", "chrf", "f1", "exact", "matthews", "spearman", "accuracy")  # higher is better; most common first
PERCENTAGES = ("accuracy", "f1", "exact")
NAMES = {"bleu": "BLEU", "chrf": "chrF", "f1": "F1", "exact": "exact match"}

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 240, 58, 14, 12, 28  # size and margins of a chart
MAX_POINTS = 240  # of a curve: more are indistinguishable on a screen
MAX_SAMPLES, MAX_CHARS, MAX_NOTES, MAX_LABELS = 20, 2000, 200, 80  # of a report, text, report, confusion matrix


class Bin(NamedTuple):
    """Neighboring points of a curve drawn as one: first and last step; mean, minimum and maximum value."""

    first: float
    last: float
    mean: float
    low: float
    high: float


class Curve(NamedTuple):
    """Bins in order; None is a gap."""

    name: str
    bins: list[Bin | None]


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
    numbers = series(lines, "step"), series(lines, "validation")
    title, recipe = escape(run.resolve().name), run / "recipe.yaml"
    facts = "".join(f"<tr><th>{_name(key)}<td>{_cut(value)}" for key, value in start.items() if key != "kind")
    parts = (
        f"<header><h1>{title}</h1><p>{_summary(lines, start)}</p></header>",
        f'<div class="tiles">{"".join(_tiles(lines, *numbers, start))}</div>',
        f'<div class="grid">{"".join(_charts(lines, *numbers))}</div>',
        _section("Samples", _samples(validations)),
        _section("Confusion", _confusion(validations[-1].get("confusion")) if validations else ""),
        _section("Notes", _notes(lines)),
        _fold("Environment", f"<table>{facts}</table>" if facts else ""),
        _fold("Resolved recipe", f"<pre>{escape(read_text(recipe))}</pre>" if recipe.is_file() else ""),
    )
    page = PAGE.format(title=title, style=STYLE, body="\n".join(parts))
    return page.encode("utf-8", "replace").decode()  # samples may contain lone surrogates


def _summary(lines: Sequence[Line], start: Line) -> str:
    if not lines:
        return "Nothing has been logged yet."
    parameters = number(start.get("parameters"))
    end = next((line for line in lines if line["kind"] == "end"), None)
    parts = (
        f"recipe {start['recipe']}" if start.get("recipe") else "",
        f"{_short(parameters)} parameters" if parameters else "",
        "not finished" if end is None else str(end.get("reason") or "finished"),
    )
    return escape(" · ".join(filter(None, parts)))


def _tiles(lines: Sequence[Line], training: Series, validation: Series, start: Line) -> Iterator[str]:
    """Headline numbers: best metrics, steps, speed, time."""
    logged = (line["signature"] for line in reversed(lines) if isinstance(line.get("signature"), dict))
    signatures: dict[str, Any] = next(logged, {})
    metrics = [key for key in ("loss", *METRICS) if _known(validation[key])][:3]
    for key in metrics:
        best = (min if key == "loss" else max)(_known(validation[key]))
        step = next(step for step, value in validation[key] if value == best)
        perplexity = dict(validation["perplexity"]).get(step) if key == "loss" else None
        details = [f"at step {step:,.0f}", f"perplexity {_show(perplexity)}" if perplexity else ""]
        name = "validation loss" if key == "loss" else NAMES.get(key, key)
        yield _tile(f"Best {name}", _show(best, key), details, signatures.get(key, ""))
    if not metrics and (losses := _known(training["loss"])):
        yield _tile("Training loss", _show(losses[-1]), ["no validation yet"])
    if steps := [value for line in lines if (value := number(line.get("step"))) is not None]:
        total, epochs = number(start.get("steps")), _known(training["epoch"])
        details = [f"of {total:,.0f}" if total else "", f"epoch {_show(epochs[-1])}" if epochs else ""]
        yield _tile("Steps", f"{max(steps):,.0f}", details)
    if speeds := _known(training["tokens_per_second"]):
        mfu = _known(training["mfu"])
        details = [f"{statistics.median(mfu):.0%} MFU" if mfu else ""]
        yield _tile("Tokens per second", _show(statistics.median(speeds)), details)
    if seconds := elapsed(lines):
        yield _tile("Time", _duration(seconds), [])


def _charts(lines: Sequence[Line], training: Series, validation: Series) -> Iterator[str]:
    """One chart per number in the log, the common ones first."""
    kinds = {"training": training, "validation": validation}
    known = {key for _, _, keys in CHARTS for key in keys} | {*NOT_CHARTED}
    others = dict.fromkeys(key for numbers in kinds.values() for key in numbers if key not in known)
    for title, unit, keys in (*CHARTS, *((_name(key), "", (key,)) for key in others)):
        curves = [
            Curve(kind if len(keys) == 1 else NAMES[key], _downsample(kinds[kind][key]))
            for key in keys
            for kind in kinds
        ]
        yield _chart(title, unit, curves, keys[0])
    exposure: Line = next((line["exposure"] for line in reversed(lines) if isinstance(line.get("exposure"), dict)), {})
    curves = [
        Curve(name, _downsample([(position, number(value)) for position, value in enumerate(exposure[key], start=1)]))
        for key, name in (("teacher_forced", "teacher forcing"), ("free_running", "free-running"))
        if isinstance(exposure.get(key), list)
    ]
    yield _chart("Exposure bias", "accuracy by position in the target", curves, "accuracy", "position")


def _downsample(points: Points) -> list[Bin | None]:
    size = max(1, math.ceil(len(points) / MAX_POINTS))
    bins: list[Bin | None] = []
    for start in range(0, len(points), size):
        known = [(x, y) for x, y in points[start : start + size] if y is not None]
        values = [y for _, y in known]
        mean = math.fsum(y / len(values) for y in values)
        bins.append(Bin(known[0][0], known[-1][0], mean, min(values), max(values)) if known else None)
    return bins


def _chart(title: str, unit: str, curves: Sequence[Curve], key: str, x_name: str = "step") -> str:
    """A figure with curves over one axis; empty without data."""
    curves = [curve for curve in curves if any(curve.bins)]
    bins = [point for curve in curves for point in curve.bins if point]
    if not bins:
        return ""
    low, high = min(point.low for point in bins), max(point.high for point in bins)
    log_scale = key in LOG_SCALE and low > 1e-100 and 100 * low < high < 1e100
    if log_scale:
        low, high = low / 1.2, high * 1.2
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = [10.0**power for power in powers[:: math.ceil(len(powers) / 6)]]
        unit += ", logarithmic"
    else:
        low, high = _widen(0.0 if 0 <= low < 0.4 * high else low, high)
        ticks = _ticks(low, high)
    begin, end = min(point.first for point in bins), max(point.last for point in bins)
    begin, end = _widen(0.0 if 0 <= begin < 0.1 * end else begin, end)

    def x(value: float) -> float:
        return LEFT + (value - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        fraction = math.log(value / low, high / low) if log_scale else (value - low) / (high - low)
        return HEIGHT - BOTTOM - fraction * (HEIGHT - TOP - BOTTOM)

    inner = [f'<path class="axis" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>' for tick in ticks]
    inner += [_label(LEFT - 8, y(tick) + 4, "end", _short(tick, key)) for tick in ticks]
    inner += [_label(x(tick), HEIGHT - 6, "middle", _short(tick)) for tick in _ticks(begin, end)]
    inner.append(_label(LEFT - 14, HEIGHT - 6, "end", x_name))
    inner += [
        f'<g class="c{index}{" few" if len(curve.bins) <= 30 else ""}">{"".join(_draw(curve, x, y, key, x_name))}</g>'
        for index, curve in enumerate(curves)
    ]
    legend = "".join(
        f'<li class="c{index}">{curve.name} <b>{_show([point for point in curve.bins if point][-1].mean, key)}</b>'
        for index, curve in enumerate(curves)
    )
    caption = f"<figcaption><h2>{title}</h2><span>{unit.lstrip(', ')}</span><ul>{legend}</ul></figcaption>"
    box = f'<svg role="img" aria-label="{title}" viewBox="0 0 {WIDTH} {HEIGHT}">'
    return f"<figure>{caption}{box}{''.join(inner)}</svg></figure>"


def _draw(
    curve: Curve, x: Callable[[float], float], y: Callable[[float], float], key: str, x_name: str
) -> Iterator[str]:
    """A line through the means, a band from minimum to maximum, and a dot with a title for each bin."""
    segments: list[list[tuple[str, Bin]]] = [[]]
    for point in curve.bins:
        if point is None:
            segments.append([])
        else:
            segments[-1].append((f"{x((point.first + point.last) / 2):.1f}", point))
    for segment in filter(None, segments):
        if any(point.low < point.high for _, point in segment):
            edge = [f"{at} {y(point.low):.1f}" for at, point in segment]
            edge += [f"{at} {y(point.high):.1f}" for at, point in reversed(segment)]
            yield f'<path class="band" d="M{"L".join(edge)}Z"/>'
        line = "L".join(f"{at} {y(point.mean):.1f}" for at, point in segment)
        yield f'<path class="line" d="M{line}h0"/>'  # h0: a segment of one bin is a dot
    for at, point in (pair for segment in segments for pair in segment):
        title = f"{curve.name}, {x_name} {point.first:,.0f}: {_show(point.mean, key)}"
        if point.first != point.last:
            title = f"{curve.name}, {x_name}s {point.first:,.0f} to {point.last:,.0f}: mean {_show(point.mean, key)}"
            title += f", min {_show(point.low, key)}, max {_show(point.high, key)}"
        yield f'<circle cx="{at}" cy="{y(point.mean):.1f}" r="2.5"><title>{title}</title></circle>'


def _widen(low: float, high: float) -> tuple[float, float]:
    """The limits of an axis, extended if all values are the same."""
    if high - low > 1e-9 * max(abs(low), abs(high), 1e-200):
        return low, high
    return low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from low to high."""
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    size *= next(factor for factor in (1, 2, 5, 10) if (high - low) / size / factor <= 5.5)
    return [n * size for n in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


def _samples(validations: Sequence[Line]) -> str:
    """Outputs of the first, the middle and the last validation, with source and reference."""
    logged = [(line.get("step", 0), line["samples"]) for line in validations if isinstance(line.get("samples"), list)]
    outputs: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for index in sorted({0, len(logged) // 2, len(logged) - 1} if logged else ()):
        step, samples = logged[index]
        for sample in samples:
            if isinstance(sample, dict):
                key = (str(sample.get("source", "")), str(sample.get("reference", "")))
                outputs[key][step] = str(sample.get("output", ""))
    tables: list[str] = []
    for (source, reference), by_step in outputs.items():
        if logged[-1][0] in by_step and len(tables) < MAX_SAMPLES:
            rows = [("Source", source, ""), ("Reference", reference, "")] if reference else [("Source", source, "")]
            for step, output in by_step.items():
                rows.append((f"Step {step:,}", output, ' class="correct"' if output == reference else ""))
            cells = (f"<tr><th>{name}<td dir=auto{css}>{_cut(text)}" for name, text, css in rows)
            tables.append(f"<table>{''.join(cells)}</table>")
    return "".join(tables)


def _confusion(matrix: Any) -> str:
    """Confusion matrix: labels down, predictions across, shaded by the fraction of the row."""
    try:
        labels = [_cut(label, 24) for label in matrix["labels"][:MAX_LABELS]]
        counts = [[int(count) for count in row[: len(labels)]] for row in matrix["counts"][: len(labels)]]
    except (LookupError, TypeError, ValueError, OverflowError):
        return ""
    rows = []
    for label, row in zip(labels, counts, strict=False):
        fractions = [count / (sum(row) or 1) for count in row]
        cells = (
            f'<td class="{"full" if fraction > 0.5 else ""}" style="--share:{100 * fraction:.0f}%" '
            f'title="{label} predicted as {other}: {count:,} ({fraction:.1%})">{count:,}'
            for other, count, fraction in zip(labels, row, fractions, strict=False)
        )
        rows.append(f"<tr><th>{label}{''.join(cells)}")
    head = "".join(f"<th><span>{label}</span>" for label in labels)
    total = len(matrix["labels"])
    truncated = f" The first {MAX_LABELS} of {total} labels." if total > MAX_LABELS else ""
    table = f'<table class="confusion"><tr><th>{head}{"".join(rows)}</table>'
    return f"<p>True labels down, predictions across.{truncated}</p>{table}"


def _notes(lines: Sequence[Line]) -> str:
    notes = [line for line in lines if line["kind"] == "note"][-MAX_NOTES:]
    rows = "".join(f"<tr><th>Step {line.get('step', 0):,}<td>{_cut(line.get('text', ''))}" for line in notes)
    return f"<table>{rows}</table>" if rows else ""


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{title}</h2>{inner}</section>" if inner else ""


def _fold(title: str, inner: str) -> str:
    return f"<details><summary>{title}</summary>{inner}</details>" if inner else ""


def _tile(name: str, value: str, details: Sequence[str], hint: Any = "") -> str:
    spans = "".join(f"<span>{line}</span>" for line in filter(None, details))
    return f'<div class="tile" title="{_cut(hint)}"><span>{name}</span><b>{value}</b>{spans}</div>'


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _known(points: Points) -> list[float]:
    return [value for _, value in points if value is not None]


def _cut(text: Any, max_chars: int = MAX_CHARS) -> str:
    text = str(text)
    return escape(text if len(text) <= max_chars else text[: max_chars - 1] + "…")


def _name(key: str) -> str:
    name = NAMES.get(key, key.replace("_", " "))
    return escape(name[:1].upper() + name[1:])


def _show(value: float, key: str = "") -> str:
    """Format a number for text."""
    if key in PERCENTAGES or key.endswith("_accuracy"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _short(value: float, key: str = "") -> str:
    """Format a number for an axis."""
    if key in PERCENTAGES or key.endswith("_accuracy"):
        return f"{100 * value:.4g}%"
    size, unit = next(
        (pair for pair in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if abs(value) >= 1.0001 * pair[0]), (1, "")
    )
    return f"{value / size:.4g}{unit}" if abs(value) < 1e12 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 60:
        return f"{seconds:.3g} s" if seconds < 99 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{style}</style></head><body>
{body}
</body></html>
"""
STYLE = """
:root { color-scheme: light dark; --ground: #faf9f6; --card: #fff; --ink: #23272e; --soft: #6c727b; --rule: #e8e5df;
  --c0: #2a6f97; --c1: #c8663a; --c2: #5d8a4a; --correct: #3f7d4e }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --card: #1e2125; --ink: #e4e3df; --soft: #999fa8;
  --rule: #31353b; --c0: #74b6dd; --c1: #eda06e; --c2: #a3cb8c; --correct: #8cc79a } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1080px; padding: 2.5rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums }
h1 { font-size: 1.7rem; font-weight: 600; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1rem; font-weight: 600; margin: 0 }
header p, section > p { margin: .25rem 0 1.5rem; color: var(--soft) }
section, details { margin-top: 2rem }
section > h2 { font-size: 1.15rem; margin-bottom: .75rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: .75rem }
.tile, figure, table, pre { background: var(--card); border: 1px solid var(--rule); border-radius: 10px }
.tile { padding: .8rem 1rem }
.tile span { display: block }
.tile b { display: block; font-size: 1.5rem; font-weight: 600; line-height: 1.35 }
.tile span, figcaption span { color: var(--soft); font-size: .8rem }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: .75rem }
.tiles { margin-bottom: .75rem }
figure { margin: 0; padding: .9rem 1rem .6rem; min-width: 0; display: flex; flex-direction: column;
  justify-content: space-between }
figcaption { display: flex; flex-wrap: wrap; gap: 0 .6rem; align-items: baseline; margin-bottom: .4rem }
figcaption ul { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; margin: 0 0 0 auto; padding: 0;
  font-size: .8rem }
figcaption li::before { content: ""; display: inline-block; width: .7em; height: .7em; border-radius: 50%;
  margin-right: .4em; background: currentColor }
.c0 { color: var(--c0) } .c1 { color: var(--c1) } .c2 { color: var(--c2) }
svg { display: block; width: 100%; height: auto; overflow: visible }
svg text { fill: var(--soft); font-size: 12px }
.axis { stroke: var(--rule) } .line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round;
  stroke-linecap: round } .band { fill: currentColor; opacity: .22 }
circle { fill: transparent; stroke: transparent; stroke-width: 9 }
circle:hover, .few circle { fill: currentColor }
table { width: 100%; border-collapse: separate; border-spacing: 0; padding: .5rem 1rem; margin-bottom: .75rem }
th { width: 7.5rem; padding: .2rem .8rem .2rem 0; color: var(--soft); font-weight: 400; text-align: left;
  vertical-align: top; white-space: nowrap }
td { overflow-wrap: anywhere; white-space: pre-wrap; padding: .2rem 0 }
td.correct::after { content: " ✓"; color: var(--correct) }
.confusion { display: block; overflow-x: auto; width: max-content; max-width: 100% }
.confusion th { width: auto; vertical-align: middle; text-align: right }
.confusion tr:first-child th { vertical-align: bottom; text-align: center; padding: 0 0 .4rem }
.confusion th span { writing-mode: vertical-rl; rotate: 180deg }
.confusion td { min-width: 2.6rem; height: 2.6rem; padding: 0 .3rem; text-align: center; border: 1px solid var(--card);
  border-radius: 5px; background: color-mix(in srgb, var(--c0) var(--share), var(--ground)) }
.confusion .full { color: var(--card) }
summary { cursor: pointer; font-weight: 600; margin-bottom: .75rem }
pre { padding: 1rem; overflow-x: auto; font-size: 13px }
@media (max-width: 600px) {
  body { padding-top: 1.5rem } svg text { font-size: 14px } th { width: 5.5rem; font-size: .85rem } }
@media (max-width: 440px) { svg text { font-size: 18px } }
"""
