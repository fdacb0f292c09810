"""How nearly two rows of numbers rise together: Pearson's correlation, and Spearman's of their ranks."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def pearson(outputs: Sequence[float], references: Sequence[float]) -> float:
    """How nearly the values lie on a rising line; NaN where a side is constant or not finite."""
    paired(outputs, references)
    if not all(map(math.isfinite, (*outputs, *references))) or 1 in (len(set(outputs)), len(set(references))):
        return math.nan
    sides = []
    for values in (outputs, references):
        largest = max(map(abs, values))  # squares of very large or very small values would be lost
        sides.append([value / largest for value in values])
    return max(-1.0, min(1.0, statistics.correlation(*sides)))


def spearman(outputs: Sequence[float], references: Sequence[float]) -> float:
    """How nearly the values rise together: Pearson's correlation of their ranks, equal values sharing a mean rank."""
    paired(outputs, references)
    if any(map(math.isnan, (*outputs, *references))):
        return math.nan
    return pearson(ranks(outputs), ranks(references))


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value in their order, from 1."""
    counts = Counter(values)
    places, below = {}, 0
    for value in sorted(counts):
        places[value] = below + (counts[value] + 1) / 2
        below += counts[value]
    return [places[value] for value in values]


def paired(outputs: Sequence[A], references: Sequence[B]) -> list[tuple[A, B]]:
    """Every output with its reference; refuses rows of different lengths, and empty ones."""
    if not outputs or len(outputs) != len(references):
        raise ValueError(f"{len(outputs)} outputs and {len(references)} references; give one for each, and some")
    return list(zip(outputs, references, strict=True))
