"""Verdicts on planted data, and the false-positive rate of a whole lab."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from clearhead.lab.experiment import Prediction, Text
from clearhead.lab.registry import all_experiments
from clearhead.lab.statistics import holm, interval, p_above, rank_correlation, t_cdf, t_quantile
from clearhead.lab.verdict import decide

NO_TEXT = Text("", "")


def prediction(direction: str = "higher", at_least: float = 0.5, exact: bool = False) -> Prediction:
    return Prediction(NO_TEXT, "loss", "a", "b", direction, at_least, exact=exact)  # type: ignore[arg-type]


def outcome(effects: Sequence[float], direction: str = "higher", at_least: float = 0.5, exact: bool = False) -> str:
    return decide([(prediction(direction, at_least, exact), effects)])[0].outcome


@pytest.mark.parametrize(
    ("effects", "direction", "expected"),
    [
        ([1.0, 1.1, 0.9, 1.05, 0.95], "higher", "held"),  # clear effect
        ([-1.0, -1.1, -0.9, -1.05, -0.95], "lower", "held"),
        ([-1.0, -1.1, -0.9, -1.05, -0.95], "higher", "not held"),  # reversed
        ([0.01, -0.02, 0.0, 0.02, -0.01], "higher", "no difference"),  # none
        ([0.01, -0.02, 0.0, 0.02, -0.01], "same", "held"),
        ([0.1, 0.11, 0.09, 0.1, 0.12], "higher", "not held"),  # real, but smaller than predicted
        ([1.0, 1.1, 0.9, 1.05, 0.95], "same", "not held"),
        ([3.0, -2.0, 1.5, -1.0, 2.0], "higher", "undecided"),  # too noisy
        ([3.0, -2.0, 1.5, -1.0, 2.0], "same", "undecided"),
        ([1.0], "higher", "undecided"),  # one seed shows nothing
        ([], "higher", "undecided"),
    ],
)
def test_planted_effects(effects: list[float], direction: str, expected: str) -> None:
    assert outcome(effects, direction) == expected


def test_exact_measurements_need_no_seeds() -> None:
    assert outcome([0.6], exact=True) == "held"
    assert outcome([0.4], exact=True) == "not held"
    assert outcome([0.0], exact=True) == "no difference"
    assert outcome([-0.6], exact=True) == "not held"


def simulate(labs: int, effect: float, direction: str, wrong: str) -> float:
    """Return the share of labs of 40 predictions, five seeds each, in which any verdict is `wrong`."""
    random = np.random.default_rng(0)
    bad = 0
    for _ in range(labs):
        scales = 10 ** random.uniform(-2, 2, 40)
        lab = [
            (prediction(direction, at_least=scale), (random.normal(effect, 1, 5) * scale).tolist()) for scale in scales
        ]
        bad += any(verdict.outcome == wrong for verdict in decide(lab))
    return bad / labs


@pytest.mark.parametrize(
    ("effect", "direction", "wrong"),
    [
        (0, "higher", "held"),
        (1, "higher", "not held"),
        (1, "higher", "no difference"),
        (-1, "higher", "no difference"),  # reversed by just what matters
        (1, "same", "held"),
        (0, "same", "not held"),
    ],
)
def test_false_positives_of_a_lab_stay_below_five_percent(effect: float, direction: str, wrong: str) -> None:
    assert simulate(1000, effect, direction, wrong) <= 0.05


def test_our_own_lab_without_any_effect_has_no_held_prediction() -> None:
    """Every prediction of our experiments where it is false: no effect, or for "same" one that just matters."""
    random = np.random.default_rng(0)
    predictions = [p for experiment in all_experiments().values() for p in experiment.predictions if not p.exact]
    true = np.array([p.at_least if p.direction == "same" else 0.0 for p in predictions])
    noise = np.array([p.at_least for p in predictions])
    bad = 0
    for _ in range(1000):
        effects = true[:, None] + random.normal(0, 1, (len(true), 5)) * (noise * 10 ** random.uniform(-1, 1))[:, None]
        bad += any(v.outcome == "held" for v in decide(list(zip(predictions, effects.tolist(), strict=True))))
    assert bad / 1000 <= 0.05


def test_without_correction_a_lab_would_report_false_effects() -> None:
    random = np.random.default_rng(0)
    alone = [outcome(random.normal(0, 1, 5).tolist(), at_least=0.01) == "held" for _ in range(400)]
    assert 0.02 < np.mean(alone) < 0.09  # so the simulation above can fail


def test_t_distribution_agrees_with_tables() -> None:
    for freedom, value in ((1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042)):
        assert t_quantile(0.975, freedom) == pytest.approx(value, abs=6e-4)
    assert t_cdf(0, 3) == pytest.approx(0.5)
    assert t_cdf(-2, 5) == pytest.approx(1 - t_cdf(2, 5))


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = []
    for _ in range(400):
        low, high = interval(random.normal(3, 2, 5).tolist())
        covered.append(low <= 3 <= high)
    assert 0.92 < np.mean(covered) < 0.98


def test_holm_adjusts_from_the_smallest() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.01, 0.04, 0.03], most_true=2) == pytest.approx([0.02, 0.06, 0.06])


def test_p_values_of_constant_samples() -> None:
    assert (p_above([1, 1, 1], 0), p_above([0, 0], 0), p_above([5], 0)) == (0, 1, 1)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 25, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [1, 1, 3]) == pytest.approx(1)
    assert rank_correlation([1, 1], [1, 2]) == 0


def test_predictions_ignore_diverged_seeds_and_compare_pairwise() -> None:
    results = {"a": {"loss": [2.0, math.inf, 3.0]}, "b": {"loss": [1.0, 1.0, 2.0]}}
    assert prediction().effects(results) == [1.0, 1.0]


def test_bleu_of_zero_on_both_sides_shows_nothing() -> None:
    same = Prediction(NO_TEXT, "bleu", "a", "b", "same", 1.0)
    untrained = {"a": {"bleu": [0.0, 0.0]}, "b": {"bleu": [0.0, 0.0]}}
    assert same.effects(untrained) == []
    assert decide([(same, [])])[0].outcome == "undecided"
    assert same.effects({"a": {"bleu": [0.0, 1.0]}, "b": {"bleu": [0.0, 0.0]}}) == [0.0, 1.0]
