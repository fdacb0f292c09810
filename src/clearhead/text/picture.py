"""Tokenizers side by side as a picture (SVG): four measures as bars, and how long their tokens are."""

from collections.abc import Callable
from html import escape

from clearhead.text.stats import Stats

COLORS = ("#2a6f97", "#e07a5f", "#3d9970", "#8f6bb3", "#c9a227", "#5c677d")
MEASURES: tuple[tuple[str, str, Callable[[Stats], float], str], ...] = (
    ("tokens per word", "fewer is shorter", lambda s: s.tokens_per_word, "{:.2f}"),
    ("bytes per token", "more is shorter", lambda s: s.bytes_per_token, "{:.2f}"),
    ("unknown tokens", "", lambda s: s.unknown_rate, "{:.2%}"),
    ("vocabulary in use", "", lambda s: s.vocabulary_used, "{:.0%}"),
)
WIDTH, BAR, LONGEST = 760, 20, 16


def draw(found: dict[str, Stats]) -> str:
    """The SVG of some tokenizers measured on the same text."""
    parts = [_text(20, 32, "Tokenizers on the same text", 18, bold=True)]
    for number, name in enumerate(found):
        x = 20 + number * (WIDTH - 40) / len(found)
        parts.append(f'<rect x="{x:.0f}" y="46" width="12" height="12" rx="2" fill="{_color(number)}"/>')
        parts.append(_text(x + 18, 57, name[-int(100 / len(found)) :], 13))
    height = 70
    for place, (title, hint, measure, form) in enumerate(MEASURES):
        x, y = 20 + place % 2 * 370, 90 + place // 2 * (50 + BAR * len(found))
        parts.append(_text(x, y, title + (f" ({hint})" if hint else ""), 13, bold=True))
        most = max(measure(each) for each in found.values()) or 1.0
        for number, each in enumerate(found.values()):
            value, top = measure(each), y + 8 + BAR * number
            length = 240 * value / most
            parts.append(f'<rect x="{x}" y="{top}" width="{length:.1f}" height="{BAR - 6}" fill="{_color(number)}"/>')
            parts.append(_text(x + length + 6, top + 11, form.format(value), 12))
        height = max(height, y + 8 + BAR * len(found))
    parts += _lengths(found, height + 40)
    total = height + 270
    style = "text{font-family:system-ui,sans-serif;fill:#222}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _lengths(found: dict[str, Stats], top: float) -> list[str]:
    """The share of tokens of every length, a line for each tokenizer."""
    shares = [
        [sum(n for size, n in s.lengths.items() if size == k or (k == LONGEST < size)) / s.tokens for k in range(1, 17)]
        for s in found.values()
    ]
    most = max(max(row) for row in shares)
    left, bottom, wide, high = 60, top + 180, WIDTH - 100, 150
    parts = [_text(20, top, "Share of tokens by their number of characters", 13, bold=True)]
    for k in range(1, LONGEST + 1):
        label = f"{k}+" if k == LONGEST else str(k)
        parts.append(_text(left + wide * (k - 1) / 15, bottom + 18, label, 11, anchor="middle"))
    for share in (0.0, most / 2, most):
        y = bottom - high * share / most
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + wide}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(left - 8, y + 4, f"{share:.0%}", 11, anchor="end"))
    for number, row in enumerate(shares):
        points = " ".join(f"{left + wide * k / 15:.1f},{bottom - high * v / most:.1f}" for k, v in enumerate(row))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_color(number)}" stroke-width="2.5"/>')
    return parts


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _text(x: float, y: float, text: str, size: int, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}"{weight} text-anchor="{anchor}">{escape(text)}</text>'
