"""What an experiment is: a claim, predictions made before the first run, a measurement, figures."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.lab.runner import Run

# Cell (a variant, or "series|x") to metric to one value for each seed
Results = dict[str, dict[str, list[float]]]


class Text(NamedTuple):
    """A text in English and Chinese."""

    en: str
    zh: str


NO_TEXT = Text("", "")
FLOOR = {"bleu": 0.0}  # where both sides of every seed are there, no difference can show


@dataclass(frozen=True)
class Prediction:
    """The effect we expect: `metric` of cell `of`, minus that of cell `against` (or a number), seed by seed.

    `at_least` is the smallest effect that matters. With `relative`, the effect is of / against - 1. `exact` marks
    counts and other measurements without noise.
    """

    text: Text
    metric: str
    of: str
    against: str | float
    direction: Literal["higher", "lower", "same"]
    at_least: float
    relative: bool = False
    exact: bool = False

    def effects(self, results: Results) -> list[float]:
        """Return the effect for each seed."""
        values = _cell(results, self.of, self.metric)
        if isinstance(self.against, str):
            base = _cell(results, self.against, self.metric)
        else:
            base = [self.against] * len(values)
        pairs = list(zip(values, base, strict=True))
        if all(pair == (FLOOR.get(self.metric),) * 2 for pair in pairs):
            return []
        effects = [value / other - 1 if self.relative else value - other for value, other in pairs]
        return [effect for effect in effects if math.isfinite(effect)]

    def means(self, results: Results) -> tuple[float, float]:
        """Return the means of both sides."""
        values = _cell(results, self.of, self.metric)
        base = _cell(results, self.against, self.metric) if isinstance(self.against, str) else [self.against]
        return math.fsum(values) / len(values), math.fsum(base) / len(base)

    def noise(self, results: Results) -> float:
        """Return the noise floor: the standard deviation of the baseline over the seeds."""
        values = _cell(results, self.against if isinstance(self.against, str) else self.of, self.metric)
        mean = math.fsum(values) / len(values)
        return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


@dataclass(frozen=True)
class Figure:
    """A chart of one metric: a bar for each cell, or a line for each series of cells named "series|x"."""

    metric: str
    title: Text
    x: Text = NO_TEXT
    only: tuple[str, ...] = ()  # the cells or series to draw; empty: all that have the metric
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Experiment:
    """One claim under test. `measure` fills the results; `checklist` numbers the statements it covers."""

    name: str
    title: Text
    claim: Text
    checklist: tuple[int, ...]
    predictions: tuple[Prediction, ...]
    measure: Callable[["Run"], Results]
    figures: tuple[Figure, ...] = ()
    note: Text = NO_TEXT  # scale and limits of the experiment
    papers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # corpora of CLEARHEAD_DATA
    source: str = field(default="", compare=False)  # file of the experiment

    def hash(self) -> str:
        """SHA-256 of the claim and its predictions; stored before the first run."""
        predictions = [asdict(prediction) for prediction in self.predictions]
        data = {"name": self.name, "claim": self.claim, "predictions": predictions}
        return hashlib.sha256(json.dumps(data, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _cell(results: Mapping[str, Mapping[str, list[float]]], cell: str, metric: str) -> list[float]:
    try:
        return results[cell][metric]
    except KeyError:
        raise UserError(f"prediction: no {metric!r} of {cell!r} in the results; cells: {', '.join(results)}") from None
