"""Verdicts from effects: held, not held, no difference, or undecided.

A prediction of a direction has three hypotheses to reject, and Holm's correction runs over those of the whole lab:
"there is no effect in the predicted direction" (support), "the effect is at least the smallest that matters" (refute)
and "the reversed effect is at least that large" (equivalence, together with refute). At most two of them are true.
A prediction of "same" has two, of which one is true: "the difference matters" (support), "there is none" (refute).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from clearhead.lab.experiment import Experiment, Prediction, Results
from clearhead.lab.statistics import holm, interval, mean_and_error, p_above

LEVEL = 0.05
Outcome = Literal["held", "not held", "no difference", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one prediction, with effect and 95% interval; p-values are corrected over the lab."""

    outcome: Outcome
    effect: float
    low: float
    high: float
    seeds: int
    p_support: float
    p_refute: float


def decide(predictions: Sequence[tuple[Prediction, Sequence[float]]]) -> list[Verdict]:
    """Return the verdict of every prediction of a lab, each given with its effects seed by seed."""
    raw = [_p_values(prediction, effects) for prediction, effects in predictions]
    adjusted = iter(holm([p for row in raw for p in row], most_true=sum(len(row) - 1 for row in raw)))
    verdicts = []
    for (prediction, effects), row in zip(predictions, raw, strict=True):
        p = [next(adjusted) for _ in row]
        effect, _ = mean_and_error(effects) if effects else (math.nan, 0)
        low, high = (-math.inf, math.inf) if not effects else interval(effects)
        if prediction.exact and effects:
            low = high = effect
        verdicts.append(Verdict(_outcome(prediction, effect, p), effect, low, high, len(effects), p[0], p[1]))
    return verdicts


def _p_values(prediction: Prediction, effects: Sequence[float]) -> list[float]:
    """Return the p-values of support and refute, and for a direction that of the reversed effect."""
    margin = prediction.at_least
    same = prediction.direction == "same"
    if not effects:
        return [1.0] * (2 if same else 3)
    if prediction.exact:
        effects = [mean_and_error(effects)[0]] * 2  # no noise: the tests compare exactly
    signed = [-effect for effect in effects] if prediction.direction == "lower" else list(effects)
    negative = [-effect for effect in signed]
    not_larger, not_smaller = p_above(negative, -margin), p_above(signed, -margin)  # within the margin, on each side
    if same:
        return [max(not_larger, not_smaller), min(1.0, 2 * min(p_above(signed, 0), p_above(negative, 0)))]
    return [p_above(signed, 0), not_larger, not_smaller]


def _outcome(prediction: Prediction, effect: float, p: Sequence[float]) -> Outcome:
    """Apply the rules; an effect that is real but smaller than what matters does not support a claim."""
    large = abs(effect) >= prediction.at_least
    support, refute = p[0] <= LEVEL, p[1] <= LEVEL
    if prediction.direction == "same":
        if support:
            return "held"
        return "not held" if refute and large else "undecided"
    if support and large:
        return "held"
    if refute:
        return "no difference" if p[2] <= LEVEL and not support else "not held"  # else smaller than predicted
    return "undecided"


def judge(finished: Mapping[str, tuple[Experiment, Results]]) -> dict[str, list[Verdict]]:
    """Return the verdicts of finished experiments by name, corrected over all their predictions."""
    flat = [
        (prediction, prediction.effects(results))
        for experiment, results in finished.values()
        for prediction in experiment.predictions
    ]
    verdicts = iter(decide(flat))
    return {name: [next(verdicts) for _ in experiment.predictions] for name, (experiment, _) in finished.items()}
