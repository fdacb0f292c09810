"""Student's t distribution, confidence intervals and Holm's correction, without scipy."""

import math
from collections.abc import Sequence
from functools import lru_cache

MAX_ITERATIONS = 300


def t_cdf(t: float, freedom: int) -> float:
    """Return P(T ≤ t) of Student's t distribution with `freedom` degrees of freedom."""
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    tail = 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=1024)
def t_quantile(probability: float, freedom: int) -> float:
    """Return the t below which a share `probability` of the distribution lies, by bisection."""
    low, high = -1e6, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of a sample and its standard error."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def p_above(values: Sequence[float], threshold: float) -> float:
    """One-sided p-value of the hypothesis that the mean is at most `threshold`."""
    if len(values) < 2:
        return 1.0
    mean, error = mean_and_error(values)
    if error == 0:
        return 0.0 if mean > threshold else 1.0
    return 1 - t_cdf((mean - threshold) / error, len(values) - 1)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the t confidence interval of the mean; infinite for a single value."""
    mean, error = mean_and_error(values)
    if len(values) < 2:
        return -math.inf, math.inf
    half = t_quantile(0.5 + confidence / 2, len(values) - 1) * error
    return mean - half, mean + half


def holm(p_values: Sequence[float], most_true: int | None = None) -> list[float]:
    """Adjust p-values so that the chance of any false rejection stays below the level (Holm 1979).

    `most_true`: how many of the hypotheses can be true at once, if fewer than all (Shaffer 1986).
    """
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        remaining = len(p_values) - rank
        factor = remaining if most_true is None else min(remaining, most_true)
        running = max(running, min(1.0, factor * p_values[index]))
        adjusted[index] = running
    return adjusted


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank, and a constant list gives 0."""
    ranks = [_ranks(values) for values in (a, b)]
    centered = [[rank - (len(a) + 1) / 2 for rank in row] for row in ranks]
    norm = math.sqrt(math.prod(math.fsum(value * value for value in row) for row in centered))
    return math.fsum(x * y for x, y in zip(*centered, strict=True)) / norm if norm else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    row = list(values)
    return [sum(other < value for other in row) + (row.count(value) + 1) / 2 for value in row]


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularized incomplete beta function I_x(a, b), by Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, MAX_ITERATIONS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + term * d), 1 + term / c
            result *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * result / a
