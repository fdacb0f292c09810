"""Pearson and Spearman correlation."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def pearson(outputs: Sequence[float], references: Sequence[float]) -> float:
    """Pearson correlation; NaN if either side is constant or not finite."""
    check_paired(outputs, references)
    if not all(map(math.isfinite, (*outputs, *references))) or 1 in (len(set(outputs)), len(set(references))):
        return math.nan
    scaled = []
    for values in (outputs, references):
        largest = max(map(abs, values))  # squares of very large or very small values would overflow or underflow
        scaled.append([value / largest for value in values])
    return max(-1.0, min(1.0, statistics.correlation(*scaled)))


def spearman(outputs: Sequence[float], references: Sequence[float]) -> float:
    """Spearman rank correlation; ties share their mean rank."""
    check_paired(outputs, references)
    if any(map(math.isnan, (*outputs, *references))):
        return math.nan
    return pearson(ranks(outputs), ranks(references))


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 1; ties share their mean rank."""
    counts = Counter(values)
    rank_of, below = {}, 0
    for value in sorted(counts):
        rank_of[value] = below + (counts[value] + 1) / 2
        below += counts[value]
    return [rank_of[value] for value in values]


def check_paired(outputs: Sequence[A], references: Sequence[B]) -> list[tuple[A, B]]:
    """Pair every output with its reference; refuse empty inputs and different lengths."""
    if not outputs or len(outputs) != len(references):
        raise ValueError(
            f"{len(outputs)} outputs and {len(references)} references; "
            "give one reference per output, and at least one pair"
        )
    return list(zip(outputs, references, strict=True))
