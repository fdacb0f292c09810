"""A run as one page to read: headline numbers, curves, samples, notes, the recipe; one file that needs nothing else."""

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
    ("Accuracy", "share of right answers", ("accuracy",)),
    ("BLEU and chrF", "points of 100", ("bleu", "chrf")),
    ("Learning rate", "", ("lr",)),
    ("Gradient norm", "before clipping", ("norm",)),
    ("Speed", "tokens per second", ("tokens_per_second",)),
)
ELSEWHERE = ("epoch", "seconds", "perplexity", "mfu")  # numbers told in words
SPREADING = ("loss", "norm")  # numbers that may range over decades
SCORES = ("bleu", "chrf", "f1", "exact", "matthews", "spearman", "accuracy")  # more is better; best known first
SHARES = ("accuracy", "f1", "exact")
NAMES = {"bleu": "BLEU", "chrf": "chrF", "f1": "F1", "exact": "exact match"}

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 240, 58, 14, 12, 28  # of a chart, and its margins for labels
SPOTS = 240  # of a curve: more are not told apart on a screen
TEXTS, TEXT, NOTES, LABELS = 20, 2000, 200, 80  # the most samples, characters of one, notes, rows of a matrix


class Spot(NamedTuple):
    """Neighboring points of a curve drawn as one: the first and the last, their mean, least and greatest value."""

    first: float
    last: float
    mean: float
    low: float
    high: float


class Curve(NamedTuple):
    """Spots in order; None is a gap."""

    name: str
    spots: list[Spot | None]


def write_report(run: Path) -> Path:
    """Write RUN/report.html from RUN/log.jsonl."""
    path = run / "report.html"
    write_text(path, report(run))
    return path


def report(run: Path) -> str:
    """The page of a run, as HTML with its own style and pictures, without scripts."""
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
        _fold("What it started with", f"<table>{facts}</table>" if facts else ""),
        _fold("The recipe as resolved", f"<pre>{escape(read_text(recipe))}</pre>" if recipe.is_file() else ""),
    )
    page = PAGE.format(title=title, style=STYLE, body="\n".join(parts))
    return page.encode("utf-8", "replace").decode()  # a sample may hold half a character


def _summary(lines: Sequence[Line], start: Line) -> str:
    if not lines:
        return "Nothing has been recorded yet."
    parameters = number(start.get("parameters"))
    end = next((line for line in lines if line["kind"] == "end"), None)
    told = (
        f"recipe {start['recipe']}" if start.get("recipe") else "",
        f"{_short(parameters)} parameters" if parameters else "",
        "not finished" if end is None else str(end.get("reason") or "finished"),
    )
    return escape(" · ".join(filter(None, told)))


def _tiles(lines: Sequence[Line], training: Series, validation: Series, start: Line) -> Iterator[str]:
    """The headline numbers: the best scores, how far, how fast, how long."""
    told_by = (line["signature"] for line in reversed(lines) if isinstance(line.get("signature"), dict))
    signatures: dict[str, Any] = next(told_by, {})
    scores = [key for key in ("loss", *SCORES) if _known(validation[key])][:3]
    for key in scores:
        best = (min if key == "loss" else max)(_known(validation[key]))
        step = next(step for step, value in validation[key] if value == best)
        perplexity = dict(validation["perplexity"]).get(step) if key == "loss" else None
        told = [f"at step {step:,.0f}", f"perplexity {_show(perplexity)}" if perplexity else ""]
        name = "validation loss" if key == "loss" else NAMES.get(key, key)
        yield _tile(f"Best {name}", _show(best, key), told, signatures.get(key, ""))
    if not scores and (losses := _known(training["loss"])):
        yield _tile("Training loss", _show(losses[-1]), ["no validation yet"])
    if steps := [place for line in lines if (place := number(line.get("step"))) is not None]:
        total, epochs = number(start.get("steps")), _known(training["epoch"])
        told = [f"of {total:,.0f}" if total else "", f"epoch {_show(epochs[-1])}" if epochs else ""]
        yield _tile("Steps", f"{max(steps):,.0f}", told)
    if speeds := _known(training["tokens_per_second"]):
        shares = _known(training["mfu"])
        told = [f"{statistics.median(shares):.0%} of the machine’s peak" if shares else ""]
        yield _tile("Tokens per second", _show(statistics.median(speeds)), told)
    if seconds := elapsed(lines):
        yield _tile("Time", _duration(seconds), [])


def _charts(lines: Sequence[Line], training: Series, validation: Series) -> Iterator[str]:
    """A chart for every number in the log, the well-known ones first."""
    kinds = {"training": training, "validation": validation}
    told = {key for _, _, keys in CHARTS for key in keys} | {*ELSEWHERE}
    others = dict.fromkeys(key for numbers in kinds.values() for key in numbers if key not in told)
    for title, unit, keys in (*CHARTS, *((_name(key), "", (key,)) for key in others)):
        curves = [
            Curve(kind if len(keys) == 1 else NAMES[key], _thin(numbers[key]))
            for key in keys
            for kind, numbers in kinds.items()
        ]
        yield _chart(title, unit, curves, keys[0])
    exposure: Line = next((line["exposure"] for line in reversed(lines) if isinstance(line.get("exposure"), dict)), {})
    curves = [
        Curve(name, _thin([(place, number(value)) for place, value in enumerate(exposure[key], start=1)]))
        for key, name in (("forced", "after true words"), ("free", "after its own"))
        if isinstance(exposure.get(key), list)
    ]
    yield _chart("Exposure bias", "accuracy by place in the target", curves, "accuracy", "place")


def _thin(points: Points) -> list[Spot | None]:
    size = max(1, math.ceil(len(points) / SPOTS))
    spots: list[Spot | None] = []
    for place in range(0, len(points), size):
        known = [(x, y) for x, y in points[place : place + size] if y is not None]
        values = [y for _, y in known]
        mean = math.fsum(y / len(values) for y in values)
        spots.append(Spot(known[0][0], known[-1][0], mean, min(values), max(values)) if known else None)
    return spots


def _chart(title: str, unit: str, curves: Sequence[Curve], key: str, across: str = "step") -> str:
    """A figure of curves over one axis, or nothing where there is nothing to draw."""
    curves = [curve for curve in curves if any(curve.spots)]
    spots = [spot for curve in curves for spot in curve.spots if spot]
    if not spots:
        return ""
    low, high = min(spot.low for spot in spots), max(spot.high for spot in spots)
    decades = key in SPREADING and low > 1e-100 and 100 * low < high < 1e100
    if decades:
        low, high = low / 1.2, high * 1.2
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        marks = [10.0**power for power in powers[:: math.ceil(len(powers) / 6)]]
        unit += ", logarithmic"
    else:
        low, high = _apart(0.0 if 0 <= low < 0.4 * high else low, high)
        marks = _ticks(low, high)
    begin, end = min(spot.first for spot in spots), max(spot.last for spot in spots)
    begin, end = _apart(0.0 if 0 <= begin < 0.1 * end else begin, end)

    def x(value: float) -> float:
        return LEFT + (value - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        share = math.log(value / low, high / low) if decades else (value - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    inner = [f'<path class="axis" d="M{LEFT} {y(mark):.1f}H{WIDTH - RIGHT}"/>' for mark in marks]
    inner += [_label(LEFT - 8, y(mark) + 4, "end", _short(mark, key)) for mark in marks]
    inner += [_label(x(mark), HEIGHT - 6, "middle", _short(mark)) for mark in _ticks(begin, end)]
    inner.append(_label(LEFT - 14, HEIGHT - 6, "end", across))
    inner += [
        f'<g class="c{place}{" few" if len(curve.spots) <= 30 else ""}">{"".join(_draw(curve, x, y, key, across))}</g>'
        for place, curve in enumerate(curves)
    ]
    legend = "".join(
        f'<li class="c{place}">{curve.name} <b>{_show([spot for spot in curve.spots if spot][-1].mean, key)}</b>'
        for place, curve in enumerate(curves)
    )
    caption = f"<figcaption><h2>{title}</h2><span>{unit.lstrip(', ')}</span><ul>{legend}</ul></figcaption>"
    box = f'<svg role="img" aria-label="{title}" viewBox="0 0 {WIDTH} {HEIGHT}">'
    return f"<figure>{caption}{box}{''.join(inner)}</svg></figure>"


def _draw(
    curve: Curve, x: Callable[[float], float], y: Callable[[float], float], key: str, across: str
) -> Iterator[str]:
    """A line through the means, a pale band from the least to the greatest, and a dot with a title for each spot."""
    stretches: list[list[tuple[str, Spot]]] = [[]]
    for spot in curve.spots:
        if spot is None:
            stretches.append([])
        else:
            stretches[-1].append((f"{x((spot.first + spot.last) / 2):.1f}", spot))
    for stretch in filter(None, stretches):
        if any(spot.low < spot.high for _, spot in stretch):
            edge = [f"{at} {y(spot.low):.1f}" for at, spot in stretch]
            edge += [f"{at} {y(spot.high):.1f}" for at, spot in reversed(stretch)]
            yield f'<path class="band" d="M{"L".join(edge)}Z"/>'
        line = "L".join(f"{at} {y(spot.mean):.1f}" for at, spot in stretch)
        yield f'<path class="line" d="M{line}h0"/>'  # h0: a stretch of one spot is a dot
    for at, spot in (pair for stretch in stretches for pair in stretch):
        told = f"{curve.name}, {across} {spot.first:,.0f}: {_show(spot.mean, key)}"
        if spot.first != spot.last:
            told = f"{curve.name}, {across}s {spot.first:,.0f} to {spot.last:,.0f}: mean {_show(spot.mean, key)}"
            told += f", from {_show(spot.low, key)} to {_show(spot.high, key)}"
        yield f'<circle cx="{at}" cy="{y(spot.mean):.1f}" r="2.5"><title>{told}</title></circle>'


def _apart(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis, apart even where all values are the same."""
    if high - low > 1e-9 * max(abs(low), abs(high), 1e-200):
        return low, high
    return low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from low to high."""
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    size *= next(times for times in (1, 2, 5, 10) if (high - low) / size / times <= 5.5)
    return [place * size for place in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


def _samples(validations: Sequence[Line]) -> str:
    """What the model said at the first, the middle and the last validation, below source and reference."""
    told = [(line.get("step", 0), line["samples"]) for line in validations if isinstance(line.get("samples"), list)]
    outputs: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for place in sorted({0, len(told) // 2, len(told) - 1} if told else ()):
        for sample in told[place][1]:
            if isinstance(sample, dict):
                known = (str(sample.get("source", "")), str(sample.get("reference", "")))
                outputs[known][told[place][0]] = str(sample.get("output", ""))
    tables: list[str] = []
    for (source, reference), several in outputs.items():
        if told[-1][0] in several and len(tables) < TEXTS:
            rows = [("Source", source, ""), ("Reference", reference, "")] if reference else [("Source", source, "")]
            for step, output in several.items():
                rows.append((f"Step {step:,}", output, ' class="right"' if output == reference else ""))
            cells = (f"<tr><th>{name}<td dir=auto{right}>{_cut(text)}" for name, text, right in rows)
            tables.append(f"<table>{''.join(cells)}</table>")
    return "".join(tables)


def _confusion(found: Any) -> str:
    """Truths down, answers across; a cell is darker the more of its row it holds."""
    try:
        labels = [_cut(label, 24) for label in found["labels"][:LABELS]]
        counts = [[int(count) for count in row[: len(labels)]] for row in found["counts"][: len(labels)]]
    except (LookupError, TypeError, ValueError, OverflowError):
        return ""
    rows = []
    for label, row in zip(labels, counts, strict=False):
        shares = [count / (sum(row) or 1) for count in row]
        cells = (
            f'<td class="{"full" if share > 0.5 else ""}" style="--share:{100 * share:.0f}%" '
            f'title="{label} called {other}: {count:,} ({share:.1%})">{count:,}'
            for other, count, share in zip(labels, row, shares, strict=False)
        )
        rows.append(f"<tr><th>{label}{''.join(cells)}")
    head = "".join(f"<th><span>{label}</span>" for label in labels)
    cut = f" The first {LABELS} of {len(found['labels'])} labels." if len(found["labels"]) > LABELS else ""
    return (
        f'<p>True labels down, answers across.{cut}</p><table class="confusion"><tr><th>{head}{"".join(rows)}</table>'
    )


def _notes(lines: Sequence[Line]) -> str:
    notes = [line for line in lines if line["kind"] == "note"][-NOTES:]
    rows = "".join(f"<tr><th>Step {line.get('step', 0):,}<td>{_cut(line.get('text', ''))}" for line in notes)
    return f"<table>{rows}</table>" if rows else ""


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{title}</h2>{inner}</section>" if inner else ""


def _fold(title: str, inner: str) -> str:
    return f"<details><summary>{title}</summary>{inner}</details>" if inner else ""


def _tile(name: str, value: str, told: Sequence[str], hint: Any = "") -> str:
    small = "".join(f"<span>{line}</span>" for line in filter(None, told))
    return f'<div class="tile" title="{_cut(hint)}"><span>{name}</span><b>{value}</b>{small}</div>'


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _known(points: Points) -> list[float]:
    return [value for _, value in points if value is not None]


def _cut(text: Any, most: int = TEXT) -> str:
    text = str(text)
    return escape(text if len(text) <= most else text[: most - 1] + "…")


def _name(key: str) -> str:
    name = NAMES.get(key, key.replace("_", " "))
    return escape(name[:1].upper() + name[1:])


def _show(value: float, key: str = "") -> str:
    """A number to read."""
    if key in SHARES or key.endswith("_accuracy"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _short(value: float, key: str = "") -> str:
    """A number on an axis."""
    if key in SHARES or key.endswith("_accuracy"):
        return f"{100 * value:.4g}%"
    size, unit = next(
        (pair for pair in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if abs(value) >= 1.0001 * pair[0]), (1, "")
    )
    return f"{value / size:.4g}{unit}" if abs(value) < 1e12 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 99:
        return f"{seconds:.3g} s"
    if minutes < 60:
        return f"{minutes} min"
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
  --c0: #2a6f97; --c1: #c8663a; --c2: #5d8a4a; --right: #3f7d4e }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --card: #1e2125; --ink: #e4e3df; --soft: #999fa8;
  --rule: #31353b; --c0: #74b6dd; --c1: #eda06e; --c2: #a3cb8c; --right: #8cc79a } }
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
td.right::after { content: " ✓"; color: var(--right) }
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
