"""Verdicts from effects: held, not held, no difference, or undecided.

Each prediction has two hypotheses to reject, and Holm's correction runs over those of the whole lab:
support: "there is no effect in the predicted direction"; refute: "the effect is at least the smallest that matters".
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
    adjusted = holm([p for pair in raw for p in pair[:2]])
    verdicts = []
    for index, (prediction, effects) in enumerate(predictions):
        support, refute = adjusted[2 * index : 2 * index + 2]
        effect, _ = mean_and_error(effects) if effects else (math.nan, 0)
        low, high = (-math.inf, math.inf) if not effects else interval(effects)
        if prediction.exact and effects:
            low = high = effect
        outcome = _outcome(prediction, effect, support, refute, raw[index][2])
        verdicts.append(Verdict(outcome, effect, low, high, len(effects), support, refute))
    return verdicts


def _p_values(prediction: Prediction, effects: Sequence[float]) -> tuple[float, float, float]:
    """Return the p-values of support and refutation, and that of equivalence (two one-sided tests)."""
    margin = prediction.at_least
    if not effects:
        return 1.0, 1.0, 1.0
    if prediction.exact:
        effects = [mean_and_error(effects)[0]] * 2  # no noise: the tests compare exactly
    signed = [-effect for effect in effects] if prediction.direction == "lower" else list(effects)
    negative = [-effect for effect in signed]
    equivalence = max(p_above(signed, -margin), p_above(negative, -margin))
    if prediction.direction == "same":
        different = min(1.0, 2 * min(p_above(signed, 0), p_above(negative, 0)))
        return equivalence, different, equivalence
    return p_above(signed, 0), p_above(negative, -margin), equivalence


def _outcome(prediction: Prediction, effect: float, support: float, refute: float, equivalence: float) -> Outcome:
    """Apply the rules; an effect that is real but smaller than what matters does not support a claim."""
    large = abs(effect) >= prediction.at_least
    if prediction.direction == "same":
        if support <= LEVEL:
            return "held"
        return "not held" if refute <= LEVEL and large else "undecided"
    if support <= LEVEL and large:
        return "held"
    if refute <= LEVEL:
        return "no difference" if equivalence <= LEVEL < support else "not held"  # else smaller than predicted
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
