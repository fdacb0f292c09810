"""Plot statistics of several tokenizers as SVG: four bar charts, and the distribution of token lengths."""

from collections.abc import Callable
from html import escape

from clearhead.text.tokenizer_stats import TokenizerStats

COLORS = ("#2a6f97", "#e07a5f", "#3d9970", "#8f6bb3", "#c9a227", "#5c677d")
METRICS: tuple[tuple[str, str, Callable[[TokenizerStats], float], str], ...] = (
    ("tokens per word", "lower is better", lambda s: s.tokens_per_word, "{:.2f}"),
    ("bytes per token", "higher is better", lambda s: s.bytes_per_token, "{:.2f}"),
    ("unknown rate", "", lambda s: s.unknown_rate, "{:.2%}"),
    ("vocabulary usage", "", lambda s: s.vocab_usage, "{:.0%}"),
)
WIDTH, BAR_HEIGHT, MAX_TOKEN_LENGTH = 760, 20, 16


def plot_stats(results: dict[str, TokenizerStats]) -> str:
    """Return the SVG for tokenizers measured on the same text, by name."""
    parts = [_text(20, 32, "Tokenizers on the same text", 18, bold=True)]
    for number, name in enumerate(results):
        x = 20 + number * (WIDTH - 40) / len(results)
        parts.append(f'<rect x="{x:.0f}" y="46" width="12" height="12" rx="2" fill="{_color(number)}"/>')
        parts.append(_text(x + 18, 57, name[-int(100 / len(results)) :], 13))
    height = 70
    for index, (title, hint, metric, number_format) in enumerate(METRICS):
        x, y = 20 + index % 2 * 370, 90 + index // 2 * (50 + BAR_HEIGHT * len(results))
        parts.append(_text(x, y, title + (f" ({hint})" if hint else ""), 13, bold=True))
        largest = max(metric(stats) for stats in results.values()) or 1.0
        for number, stats in enumerate(results.values()):
            value, top = metric(stats), y + 8 + BAR_HEIGHT * number
            bar, fill = 240 * value / largest, _color(number)
            parts.append(f'<rect x="{x}" y="{top}" width="{bar:.1f}" height="{BAR_HEIGHT - 6}" fill="{fill}"/>')
            parts.append(_text(x + bar + 6, top + 11, number_format.format(value), 12))
        height = max(height, y + 8 + BAR_HEIGHT * len(results))
    parts += _plot_lengths(results, height + 40)
    total = height + 270
    style = "text{font-family:system-ui,sans-serif;fill:#222}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _plot_lengths(results: dict[str, TokenizerStats], top: float) -> list[str]:
    """Line chart of token lengths, one line per tokenizer."""
    rows = []
    for stats in results.values():
        fractions = [0.0] * MAX_TOKEN_LENGTH
        for length, count in stats.token_lengths.items():
            fractions[min(length, MAX_TOKEN_LENGTH) - 1] += count / stats.tokens
        rows.append(fractions)
    largest = max(max(row) for row in rows)
    left, bottom, width, height = 60, top + 180, WIDTH - 100, 150
    parts = [_text(20, top, "Fraction of tokens by length in characters", 13, bold=True)]
    for k in range(1, MAX_TOKEN_LENGTH + 1):
        label = f"{k}+" if k == MAX_TOKEN_LENGTH else str(k)
        parts.append(_text(left + width * (k - 1) / 15, bottom + 18, label, 11, anchor="middle"))
    for fraction in (0.0, largest / 2, largest):
        y = bottom - height * fraction / largest
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(left - 8, y + 4, f"{fraction:.0%}", 11, anchor="end"))
    for number, row in enumerate(rows):
        points = " ".join(f"{left + width * k / 15:.1f},{bottom - height * v / largest:.1f}" for k, v in enumerate(row))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_color(number)}" stroke-width="2.5"/>')
    return parts


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _text(x: float, y: float, text: str, size: int, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}"{weight} text-anchor="{anchor}">{escape(text)}</text>'
