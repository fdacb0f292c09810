"""Words and numbers of a verdict, for the command line, the report and the guide."""

import math
from collections.abc import Sequence
from typing import Any

from clearhead.lab.experiment import Experiment, Prediction, Results, Text
from clearhead.lab.names import name_in
from clearhead.lab.verdict import Verdict

OUTCOMES = {
    "held": Text("held", "成立"),
    "not held": Text("not held", "不成立"),
    "no difference": Text("no difference", "无差异"),
    "undecided": Text("undecided", "未定"),
}
DIRECTIONS = {"higher": Text("predicted: higher by at least {}", "预测：至少高 {}"),
              "lower": Text("predicted: lower by at least {}", "预测：至少低 {}"),
              "same": Text("predicted: a difference below {}", "预测：差别小于 {}")}  # fmt: skip
SCALES = {"quick": Text("quick size", "快速规模"), "full": Text("full size", "完整规模")}


def number(value: float, sign: bool = False) -> str:
    """Three significant digits, or all digits before the point: 0.0123, 12.3, 7,087,872."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 1e-9:  # rounding of fp64, not an effect
        return "0"
    plus = "+" if sign else ""
    return f"{value:{plus},.0f}" if abs(value) >= 1000 else f"{value:{plus}.3g}"


def effect(prediction: Prediction, verdict: Verdict) -> str:
    """The effect with its 95% interval, in percent if it is relative."""
    if not verdict.seeds:
        return "–"  # nothing to compare
    factor, unit = (100, "%") if prediction.relative else (1, "")
    text = number(factor * verdict.effect, sign=True) + unit
    if prediction.exact or not math.isfinite(verdict.low):
        return text
    return f"{text} [{number(factor * verdict.low, sign=True)}, {number(factor * verdict.high, sign=True)}]"


def means(prediction: Prediction, results: Results, language: int) -> str:
    """The metric and the means of both sides, such as "loss 1.87 against 1.54"."""
    of, against = (number(value) for value in prediction.means(results))
    metric, word = name_in(language, prediction.metric), (" against ", "，对照 ")[language]
    return f"{metric} {of}{word}{against}"


def rule(prediction: Prediction, language: int) -> str:
    """What was predicted, such as "predicted: higher by at least 0.02"."""
    factor, unit = (100, "%") if prediction.relative else (1, "")
    return DIRECTIONS[prediction.direction][language].format(number(factor * prediction.at_least) + unit)


def samples(experiment: Experiment, verdicts: Sequence[Verdict]) -> str:
    """The number of seeds, or of whatever else counts as one: n = 8."""
    counts = {v.seeds for p, v in zip(experiment.predictions, verdicts, strict=True) if v.seeds and not p.exact}
    return "n = " + ", ".join(map(str, sorted(counts))) if counts else ""


def scale(record: dict[str, Any], language: int) -> str:
    """Size and hardware of a record."""
    return f"{SCALES[record['scale']][language]}{(', ', '，')[language]}{record['hardware']}"
