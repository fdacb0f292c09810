"""Charts of a report: curves over steps as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from clearhead.train.report_page import is_fraction, short, show
from clearhead.train.run_log import Points

LOG_SCALE = ("loss", "grad_norm")  # logarithmic axis if the values range over decades
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 240, 58, 14, 12, 28  # size and margins of a chart
MAX_POINTS = 240  # of a curve: more are indistinguishable on a screen


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
    color: int | None = None  # default: by the order in the chart


def downsample(points: Points) -> list[Bin | None]:
    """Return the points of a curve as at most MAX_POINTS bins."""
    size = max(1, math.ceil(len(points) / MAX_POINTS))
    bins: list[Bin | None] = []
    for start in range(0, len(points), size):
        known = [(x, y) for x, y in points[start : start + size] if y is not None]
        values = [y for _, y in known]
        mean = math.fsum(y / len(values) for y in values)
        bins.append(Bin(known[0][0], known[-1][0], mean, min(values), max(values)) if known else None)
    return bins


def chart(title: str, unit: str, curves: Sequence[Curve], key: str, x_name: str = "step") -> str:
    """A figure with curves over one axis; empty if no curve has two points. The axis of a fraction ends at 100%."""
    curves = [curve for curve in curves if any(curve.bins)]
    bins = [point for curve in curves for point in curve.bins if point]
    if max((sum(point is not None for point in curve.bins) for curve in curves), default=0) < 2:
        return ""
    low, high = min(point.low for point in bins), max(point.high for point in bins)
    log_scale = key in LOG_SCALE and low > 1e-100 and 100 * low < high < 1e100
    if log_scale:
        low, high = low / 1.2, high * 1.2
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = [10.0**power for power in powers[:: math.ceil(len(powers) / 6)]]
        unit += ", logarithmic"
    else:
        high = max(1.0, high) if is_fraction(key) else high
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
    inner += [_label(LEFT - 8, y(tick) + 4, "end", short(tick, key)) for tick in ticks]
    inner += [_label(x(tick), HEIGHT - 6, "middle", short(tick)) for tick in _ticks(begin, end)]
    inner.append(_label(LEFT - 14, HEIGHT - 6, "end", x_name))
    colors = [index if curve.color is None else curve.color for index, curve in enumerate(curves)]
    inner += [
        f'<g class="c{color}{" few" if len(curve.bins) <= 30 else ""}">{"".join(_draw(curve, x, y, key, x_name))}</g>'
        for color, curve in zip(colors, curves, strict=True)
    ]
    legend = "".join(
        f'<li class="c{color}">{curve.name} <b>{show([point for point in curve.bins if point][-1].mean, key)}</b>'
        for color, curve in zip(colors, curves, strict=True)
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
        title = f"{curve.name}, {x_name} {point.first:,.0f}: {show(point.mean, key)}"
        if point.first != point.last:
            title = f"{curve.name}, {x_name}s {point.first:,.0f} to {point.last:,.0f}: mean {show(point.mean, key)}"
            title += f", min {show(point.low, key)}, max {show(point.high, key)}"
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


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
