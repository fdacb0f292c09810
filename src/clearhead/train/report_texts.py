"""Texts of a report: samples, worst mistakes, attention, confusion matrix, notes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from clearhead.train.report_page import cut
from clearhead.train.run_log import Line, number

MAX_SAMPLES, MAX_NOTES, MAX_LABELS, MAX_TOKENS = 20, 200, 80, 40  # of a report; a confusion matrix; an attention map
CELL, CHAR, GAP = 22, 7.3, 8  # pixels: a cell of the attention map, a character, the space before the tokens


def samples(validations: Sequence[Line]) -> str:
    """Outputs of the first, the middle and the last validation, with source and reference."""
    logged = [(line.get("step", 0), line["samples"]) for line in validations if isinstance(line.get("samples"), list)]
    outputs: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for index in sorted({0, len(logged) // 2, len(logged) - 1} if logged else ()):
        step, texts = logged[index]
        for sample in texts:
            if isinstance(sample, dict):
                key = (str(sample.get("source", "")), str(sample.get("reference", "")))
                outputs[key][step] = str(sample.get("output", ""))
    tables: list[str] = []
    for (source, reference), by_step in outputs.items():
        if logged[-1][0] in by_step and len(tables) < MAX_SAMPLES:
            rows = [(f"Step {step:,}", output) for step, output in by_step.items()]
            tables.append(_sample(source, reference, rows))
    return "".join(tables)


def mistakes(validation: Line) -> str:
    """The outputs of a validation that are furthest from their references, worst first."""
    listed = validation.get("mistakes")
    tables = (
        _sample(
            str(sample.get("source", "")),
            str(sample.get("reference", "")),
            [("Output", str(sample.get("output", ""))), ("Mistake", str(sample.get("mistake", "")))],
        )
        for sample in (listed[:MAX_SAMPLES] if isinstance(listed, list) else ())
        if isinstance(sample, dict)
    )
    return "".join(tables)


def _sample(source: str, reference: str, outputs: Sequence[tuple[str, str]]) -> str:
    rows = [("Source", source, ""), ("Reference", reference, "")] if reference else [("Source", source, "")]
    for name, output in outputs:
        rows.append((name, output, ' class="correct"' if output == reference else ""))
    cells = (f"<tr><th>{name}<td dir=auto{css}>{cut(text)}" for name, text, css in rows)
    return f"<table>{''.join(cells)}</table>"


def attention(drawn: Any) -> str:
    """Cross-attention of one validation sample: source tokens across, target tokens down."""
    try:
        source, target = ([str(token)[:24] for token in drawn[side][:MAX_TOKENS]] for side in ("source", "target"))
        weights = [[number(weight) or 0.0 for weight in row[: len(source)]] for row in drawn["weights"][: len(target)]]
    except (LookupError, TypeError):
        return ""
    if not source or not target:
        return ""
    left, top = (GAP + CHAR * max(map(_columns, tokens)) for tokens in (target, source))
    width, height = left + CELL * len(source) + top * 0.71, top * 0.71 + GAP + CELL * len(target)
    top = height - CELL * len(target)
    inner = "".join(_attention_map(source, target, weights, left, top))
    box = f'<svg role="img" aria-label="Attention" viewBox="0 0 {width:.0f} {height:.0f}" style="width:{width:.0f}px">'
    text = "Source tokens across, target tokens down: the weights with which each target token was predicted."
    return f'<p>{text}</p><figure class="map">{box}{inner}</svg></figure>'


def _attention_map(
    source: Sequence[str], target: Sequence[str], weights: Sequence[Sequence[float]], left: float, top: float
) -> Iterator[str]:
    strongest = max((weight for row in weights for weight in row), default=0.0) or 1.0
    for column, token in enumerate(source):
        x, y = left + CELL * (column + 0.5), top - GAP
        yield f'<text x="{x:.1f}" y="{y:.1f}" transform="rotate(-45 {x:.1f} {y:.1f})">{cut(token)}</text>'
    for row, token in enumerate(target):
        yield f'<text x="{left - GAP:.1f}" y="{top + CELL * (row + 0.68):.1f}" text-anchor="end">{cut(token)}</text>'
    for row, (token, values) in enumerate(zip(target, weights, strict=False)):
        for column, (other, weight) in enumerate(zip(source, values, strict=False)):
            shade = min(1.0, max(0.0, weight / strongest))
            yield (
                f'<rect x="{left + CELL * column:.1f}" y="{top + CELL * row:.1f}" width="{CELL - 1}" '
                f'height="{CELL - 1}" rx="3" style="--share:{100 * shade:.0f}%">'
                f"<title>{cut(token)} ← {cut(other)}: {weight:.0%}</title></rect>"
            )


def _columns(text: str) -> float:
    """The width of a text in Latin characters; Chinese ones are almost twice as wide."""
    return sum(1.8 if ord(char) > 0x2E80 else 1.0 for char in text)


def confusion(matrix: Any) -> str:
    """Confusion matrix: labels down, predictions across, shaded by the fraction of the row."""
    try:
        labels = [cut(label, 24) for label in matrix["labels"][:MAX_LABELS]]
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


def notes(lines: Sequence[Line]) -> str:
    """The last notes of a log, with their steps."""
    logged = [line for line in lines if line["kind"] == "note"][-MAX_NOTES:]
    rows = "".join(f"<tr><th>Step {line.get('step', 0):,}<td>{cut(line.get('text', ''))}" for line in logged)
    return f"<table>{rows}</table>" if rows else ""
