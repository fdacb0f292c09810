"""What the methods of a model return: frozen dataclasses with a short repr and a JSON-ready `to_dict()`.

`str(result)` is its text where it has one. Positions in a text are characters, `start` to before `end`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Self

SHOWN = 60  # characters of a text, and items of a tuple, in a repr


class Result:
    """Base of all results: a repr of the fields that differ from their defaults, and `to_dict()`."""

    def __repr__(self) -> str:
        shown = [
            f"{each.name}={_short(value)}"
            for each in fields(self)  # type: ignore[arg-type]
            if each.repr and (value := getattr(self, each.name)) != each.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; a number that JSON lacks (NaN, infinity) is None."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]


class Ranked(Result):
    """A result that may be the best of several candidates."""

    if TYPE_CHECKING:
        others: tuple[Self, ...]

    @property
    def candidates(self) -> tuple[Self, ...]:
        """All candidates, best first: this one, then the others."""
        return (replace(self, others=()) if self.others else self, *self.others)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """As for any result, with a list `candidates` where there are several."""
        shown = super().to_dict()
        others = shown.pop("others")
        return shown | ({"candidates": [shown, *others]} if others else {})


@dataclass(frozen=True, repr=False)
class GenerationResult(Ranked):
    """A generated text, without its prompt."""

    text: str
    score: float | None = None  # log-probability over the length penalty; of beam search, or with logprobs=True
    finished: bool = True  # False: the token limit came before the end
    ids: tuple[int, ...] = field(default=(), repr=False)  # the new tokens, without the end
    logprobs: tuple[float, ...] | None = field(default=None, repr=False, compare=False)  # of the ids and the end
    others: tuple[Self, ...] = field(default=(), repr=False)  # further candidates (samples, n_best), best first

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Alignment(Result):
    """Words of a source and its translation with links (source word, target word); one link a target word."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    links: tuple[tuple[int, int], ...]
    weights: tuple[tuple[float, ...], ...] = field(repr=False)  # attention of each target word over the source words

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The links as pairs of words, in the order of the target."""
        return tuple((self.source[i], self.target[j]) for i, j in self.links)

    def __str__(self) -> str:
        """The Moses format: `0-0 2-1`."""
        return " ".join(f"{i}-{j}" for i, j in sorted(self.links))


@dataclass(frozen=True, repr=False)
class Translation(GenerationResult):
    """A translation; an empty text stays empty."""

    alignment: Alignment | None = None  # with align=True


@dataclass(frozen=True, repr=False)
class MaskToken(Result):
    """A predicted token for a mask, and its probability."""

    text: str
    score: float


@dataclass(frozen=True, repr=False)
class MaskPrediction(Result):
    """One mask of a text and its predicted tokens, best first."""

    start: int
    end: int
    tokens: tuple[MaskToken, ...]


@dataclass(frozen=True, repr=False)
class MaskFill(Result):
    """A text with every mask filled by its best token; `masks` holds all the candidates."""

    text: str
    masks: tuple[MaskPrediction, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Label(Result):
    """A label and its probability."""

    name: str
    score: float


@dataclass(frozen=True, repr=False)
class Classification(Result):
    """The best label of a text, its probability, and all labels, best first."""

    label: str
    score: float
    labels: tuple[Label, ...] = field(repr=False)

    @property
    def scores(self) -> dict[str, float]:
        """Label to probability, best first."""
        return {label.name: label.score for label in self.labels}

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, repr=False)
class TaggedWord(Result):
    """A word, its tag and the tag's probability."""

    text: str
    start: int
    end: int
    tag: str
    score: float


@dataclass(frozen=True, repr=False)
class Span(Result):
    """Consecutive words of one entity; the score is the lowest score of its words."""

    text: str
    start: int
    end: int
    label: str
    score: float


@dataclass(frozen=True, repr=False)
class Tagging(Result):
    """A text with its tagged words and the spans they form (one per word if the tags are not BIO tags)."""

    text: str
    words: tuple[TaggedWord, ...] = field(repr=False)
    spans: tuple[Span, ...]


@dataclass(frozen=True, repr=False)
class Answer(Ranked):
    """A span of the context, or "" (0 to 0) if the context has no answer; the score is its probability."""

    text: str
    start: int
    end: int
    score: float
    others: tuple[Answer, ...] = field(default=(), repr=False)  # further answers, best first

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Match(Result):
    """A text, its index in the list that was searched, and the cosine similarity to the query."""

    text: str
    index: int
    score: float


def ranked(candidates: Sequence[Any], n_best: int = 1) -> Any:
    """The first of the candidates, holding the others; of an n-best list (n > 1), only the n best distinct texts."""
    if n_best > 1:  # several token sequences may decode to one text; the first of them has the best score
        distinct = dict[str, Any]()
        for candidate in candidates:
            distinct.setdefault(candidate.text, candidate)
        candidates = list(distinct.values())[:n_best]
    return replace(candidates[0], others=tuple(candidates[1:])) if len(candidates) > 1 else candidates[0]


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN else value[: SHOWN - 1] + "…")
    if isinstance(value, tuple):
        more = f", … {len(value) - 5} more" if len(value) > 5 else ""
        return f"[{', '.join(map(_short, value[:5]))}{more}]"
    return repr(value)
