"""Charts of an experiment as SVG: a dot with its 95% interval for each cell, or lines over x for cells "series|x"."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from clearhead.lab.experiment import Figure, Results
from clearhead.lab.names import name_in
from clearhead.lab.statistics import interval, mean_and_error

WIDTH, LEFT, RIGHT, TOP, BOTTOM, ROW = 440, 56, 16, 14, 40, 26
HEIGHT = 250
MAX_LABEL = 230  # width of the cells' names, of WIDTH
LEGEND = 185  # width of a name in the legend
COLORS = ("#2a6f97", "#c8663a", "#5d8a4a", "#8a5a9e", "#b08a1e", "#4a8f8c", "#b5486e", "#7a6a58")
STYLE = "text{font:12px system-ui,sans-serif;fill:currentColor}.axis{stroke:currentColor;opacity:.2}.one{opacity:.35}"


class Point(NamedTuple):
    """Mean of a cell, with its 95% interval and the values of the seeds."""

    mean: float
    low: float
    high: float
    values: tuple[float, ...]


def draw(figure: Figure, results: Results, language: int = 0) -> str:
    """Return the chart as SVG, in English (0) or Chinese (1); empty if nothing has the metric."""
    cells = {name: _point(metrics[figure.metric]) for name, metrics in results.items() if figure.metric in metrics}
    chosen = figure.only
    cells = {name: point for name, point in cells.items() if not chosen or name.partition("|")[0] in chosen}
    if not cells:
        return ""
    if all("|" in name and _number(name.partition("|")[2]) is not None for name in cells):
        return _lines(figure, cells, language)
    return _rows({name_in(language, name): point for name, point in cells.items()})


def _point(values: Sequence[float]) -> Point:
    kept = [value for value in values if math.isfinite(value)] or [math.nan]
    mean, _ = mean_and_error(kept)
    low, high = interval(kept) if len(kept) > 1 else (mean, mean)
    return Point(mean, low, high, tuple(kept))


def _width(text: str) -> float:
    """Estimate the width of a text at 12 px."""
    return sum(12.0 if ord(letter) > 0x2E80 else 6.6 for letter in text)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _rows(cells: dict[str, Point]) -> str:
    """A row for each cell."""
    labels = min(MAX_LABEL, 24 + max(_width(name) for name in cells))
    low = min(min(point.low, *point.values) for point in cells.values())
    high = max(max(point.high, *point.values) for point in cells.values())
    ticks = list(_ticks(low, high))
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    height = TOP + ROW * len(cells) + BOTTOM - 12

    def x(value: float) -> float:
        return labels + (value - low) / ((high - low) or 1) * (WIDTH - labels - RIGHT - 6)

    parts = [
        f'<path class="axis" d="M{x(t):.1f} {TOP}V{height - 24}"/>' + _text(x(t), height - 8, "middle", t)
        for t in ticks
    ]
    for index, (name, point) in enumerate(cells.items()):
        y = TOP + ROW * (index + 0.5)
        parts.append(_text(labels - 12, y + 4, "end", name))
        parts.append(_interval(x(point.low), y, x(point.high), y, COLORS[0]))
        parts += [_dot(x(value), y, 2, COLORS[0], "one") for value in point.values]
        parts.append(_dot(x(point.mean), y, 4.5, COLORS[0], "", f"{name}: {point.mean:.4g}"))
    return _svg(height, parts)


def _lines(figure: Figure, cells: dict[str, Point], language: int) -> str:
    """A line for each series."""
    series: dict[str, list[tuple[float, Point]]] = {}
    for name, point in cells.items():
        series.setdefault(name_in(language, name.partition("|")[0]), []).append((float(name.partition("|")[2]), point))
    xs = sorted({value for line in series.values() for value, _ in line})
    logs = figure.log_y and min(point.low for point in cells.values()) > 0
    low = min(point.mean if logs else min(point.low, point.mean) for point in cells.values())
    high = max(point.high for point in cells.values())
    ticks = list(_powers(low, high) if logs else _ticks(low, high))
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def x(value: float) -> float:
        scale = math.log if figure.log_x and xs[0] > 0 else float
        span = scale(xs[-1]) - scale(xs[0])
        return LEFT + 10 + (scale(value) - scale(xs[0])) / (span or 1) * (WIDTH - LEFT - RIGHT - 20)

    def y(value: float) -> float:
        scale = math.log if logs else float
        share = (scale(max(value, low)) - scale(low)) / ((scale(high) - scale(low)) or 1)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<path class="axis" d="M{LEFT} {y(t):.1f}H{WIDTH - RIGHT}"/>' + _text(LEFT - 8, y(t) + 4, "end", t)
        for t in ticks
    ]
    parts += [_text(x(value), HEIGHT - 22, "middle", value) for value in xs]
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 4, "middle", figure.x[language]))
    for index, (name, line) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        line.sort()
        path = "L".join(f"{x(value):.1f} {y(point.mean):.1f}" for value, point in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for value, point in line:
            parts.append(_interval(x(value), y(point.low), x(value), y(point.high), color))
            parts.append(_dot(x(value), y(point.mean), 4, color, "", f"{name}, {value:g}: {point.mean:.4g}"))
    legend = _legend(list(series))
    return _svg(HEIGHT + 18 * len(legend), [*parts, *legend])


def _legend(names: list[str]) -> list[str]:
    """The names of the series below the chart, two in a row."""
    rows = []
    for start in range(0, len(names), 2):
        row = ""
        for column, name in enumerate(names[start : start + 2]):
            x, y = LEFT + column * LEGEND, HEIGHT + 9 * start + 14
            row += _dot(x, y - 4, 4, COLORS[(start + column) % len(COLORS)]) + _text(x + 10, y, "start", name)
        rows.append(row)
    return rows


def _ticks(low: float, high: float) -> Iterator[float]:
    """Round numbers that cover the range."""
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 5)
    for index in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1):
        yield index * step


def _powers(low: float, high: float) -> Iterator[float]:
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield 10.0**power


def _text(x: float, y: float, anchor: str, text: str | float) -> str:
    shown = text if isinstance(text, str) else _short(text)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}</text>'


def _short(value: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{round(value, 10):.4g}"


def _dot(x: float, y: float, radius: float, color: str, kind: str = "", title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}">{inner}</circle>'


def _interval(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}" stroke-width="1.5" opacity=".6"/>'


def _svg(height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    return f"{head}<style>{STYLE}</style>{''.join(parts)}</svg>"
