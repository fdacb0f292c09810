"""Learning rate schedules against numbers worked out by hand, and their settings."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config.train import OptimizerConfig, ScheduleConfig
from clearhead.errors import ConfigError
from clearhead.train.lr_schedule import lr_at_step

SCHEDULES = ["inverse-sqrt", "linear", "cosine", "wsd", "constant"]


def settings(schedule: str, **others: float) -> ScheduleConfig:
    return ScheduleConfig.build({"schedule": schedule, "lr": 0.5, "warmup": 10} | others)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_linearly(schedule: str) -> None:
    assert [lr_at_step(settings(schedule), step, 100) for step in (1, 5, 10)] == pytest.approx([0.05, 0.25, 0.5])


@pytest.mark.parametrize(
    ("schedule", "others", "expected"),
    [  # at steps 11, 55, 82, 91 and 100 of 100; warmup ends at 10, so 55 is 50% of the decay, 82 is 80%, 91 is 90%
        ("inverse-sqrt", {}, [0.5 * math.sqrt(10 / step) for step in (11, 55, 82, 91, 100)]),
        ("linear", {}, [0.5 * 89 / 90, 0.25, 0.1, 0.05, 0]),
        ("linear", {"min_lr_ratio": 0.2}, [0.1 + 0.4 * 89 / 90, 0.3, 0.18, 0.14, 0.1]),
        ("cosine", {}, [0.4998477, 0.25, 0.0477458, 0.0122359, 0]),
        ("cosine", {"min_lr_ratio": 0.1}, [0.4998629, 0.275, 0.0929712, 0.0610123, 0.05]),
        ("wsd", {}, [0.5, 0.5, 0.45, 0.225, 0]),  # decay over the last 20 steps: 82 is 2 of them, 91 is 11
        ("wsd", {"decay_ratio": 0.1, "min_lr_ratio": 0.5}, [0.5, 0.5, 0.5, 0.475, 0.25]),
        ("wsd", {"decay_ratio": 1.0}, [0.5 * 89 / 90, 0.25, 0.1, 0.05, 0]),  # no stable phase
        ("constant", {}, [0.5] * 5),
    ],
)
def test_learning_rates_after_warmup(schedule: str, others: dict[str, float], expected: list[float]) -> None:
    chosen = settings(schedule, **others)
    assert [lr_at_step(chosen, step, 100) for step in (11, 55, 82, 91, 100)] == pytest.approx(expected, abs=1e-7)


def test_inverse_sqrt_is_the_papers_formula() -> None:
    dim, warmup = 512, 4000
    chosen = ScheduleConfig(schedule="inverse-sqrt", lr=(dim * warmup) ** -0.5, warmup=warmup)
    assert chosen.lr == pytest.approx(6.98771e-4, rel=1e-5)
    for step in (1, 100, 3999, 4000, 4001, 100_000):
        paper = dim**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert lr_at_step(chosen, step, 100_000) == pytest.approx(paper, rel=1e-12)


@given(
    st.sampled_from(SCHEDULES),
    st.integers(0, 50),
    st.integers(1, 60),
    st.floats(0, 1),
    st.floats(0.01, 1),
    st.integers(1, 100),
)
def test_learning_rates_stay_between_minimum_and_peak_and_never_rise_after_warmup(
    schedule: str, warmup: int, steps: int, min_lr_ratio: float, decay_ratio: float, step: int
) -> None:
    """Also with a warmup longer than the run, a decay that starts within it, and past the last step."""
    others = {"min_lr_ratio": min_lr_ratio} if schedule in ("linear", "cosine", "wsd") else {}
    others |= {"decay_ratio": decay_ratio} if schedule == "wsd" else {}
    chosen = settings(schedule, warmup=warmup, **others)
    now, before = lr_at_step(chosen, step, steps), lr_at_step(chosen, step - 1, steps) if step > 1 else 0.0
    assert 0 <= now <= 0.5
    if step <= warmup:
        assert now == pytest.approx(0.5 * step / warmup)
    elif step > 1:
        assert now <= before + 1e-12
    if others and step >= max(steps, warmup + 1):
        assert now == pytest.approx(0.5 * min_lr_ratio)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"schedule": "cosin"}, "schedule: 'cosin' is not allowed"),
        ({"schedule": "constant", "min_lr_ratio": 0.1}, "min_lr_ratio: 0.1, but schedule constant has none"),
        (
            {"schedule": "linear", "decay_ratio": 0.1},
            "decay_ratio: 0.1, but schedule linear has none; remove decay_ratio or use schedul",
        ),
        ({"schedule": "wsd", "decay_ratio": None}, "decay_ratio: null, but schedule wsd needs it"),
        ({"lr": 0.0}, "lr: 0.0 is too small"),
        ({"lr": 1e9}, "lr: 1000000000.0 is too large"),
        ({"warmup": 1 << 60}, "warmup: 1152921504606846976 is too large"),
        ({"warm_up": 3}, "warm_up: unknown setting; did you mean warmup?"),
    ],
)
def test_wrong_schedules_are_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", "\\(")):
        ScheduleConfig.build(data)


@pytest.mark.parametrize("kind", [ScheduleConfig, OptimizerConfig])
def test_resolved_settings_round_trip(kind: type[ScheduleConfig] | type[OptimizerConfig]) -> None:
    names = SCHEDULES if kind is ScheduleConfig else ["adamw", "adam"]
    for name in names:
        chosen = kind.build({kind.__name__.removesuffix("Config").lower(): name})
        assert kind.build(chosen.model_dump()) == chosen
