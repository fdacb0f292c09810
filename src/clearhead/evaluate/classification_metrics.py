"""Accuracy, F1, Matthews correlation, entity F1 and SQuAD scores; 0 where a denominator is 0.

Predictions and references are lists of the same length.
"""

import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from clearhead.text.correlation import check_paired
from clearhead.text.entities import entities


class F1(NamedTuple):
    """Precision, recall and their harmonic mean."""

    precision: float
    recall: float
    f1: float


class EntityScores(NamedTuple):
    """F1 over all entities and for each type, and the number of reference entities of each type."""

    all: F1
    types: dict[str, F1]
    counts: dict[str, int]


class AnswerScores(NamedTuple):
    """The exact-match rate, and the mean word-level F1."""

    exact: float
    f1: float


def accuracy(predictions: Sequence[Hashable], references: Sequence[Hashable]) -> float:
    """Return the fraction of correct predictions."""
    pairs = check_paired(predictions, references)
    return sum(prediction == reference for prediction, reference in pairs) / len(pairs)


def binary_f1(predictions: Sequence[Hashable], references: Sequence[Hashable], positive: Hashable) -> F1:
    """Return the F1 of one label against all others."""
    pairs = check_paired(predictions, references)
    correct = sum(prediction == reference == positive for prediction, reference in pairs)
    return _f1(correct, sum(p == positive for p, _ in pairs), sum(r == positive for _, r in pairs))


def macro_f1(predictions: Sequence[Hashable], references: Sequence[Hashable]) -> F1:
    """Return the unweighted mean of the F1 of every label that occurs in predictions or references."""
    scores = [_f1(*counts) for counts in _label_counts(predictions, references).values()]
    return F1(*(math.fsum(values) / len(scores) for values in zip(*scores, strict=True)))


def matthews_corrcoef(predictions: Sequence[Hashable], references: Sequence[Hashable]) -> float:
    """Return the Matthews correlation coefficient of two or more classes: 1 is perfect, 0 is chance."""
    counts = _label_counts(predictions, references).values()
    total, correct = len(predictions), sum(count[0] for count in counts)
    products = sum(predicted * actual for _, predicted, actual in counts)
    predicted = total**2 - sum(count[1] ** 2 for count in counts)
    actual = total**2 - sum(count[2] ** 2 for count in counts)
    return (total * correct - products) / math.sqrt(predicted * actual) if predicted and actual else 0.0


def confusion_matrix(
    predictions: Sequence[Hashable], references: Sequence[Hashable], labels: Sequence[Hashable]
) -> list[list[int]]:
    """Return counts by reference label (row) and predicted label (column), in the order of `labels`."""
    pairs = Counter(check_paired(references, predictions))
    unknown = {label for pair in pairs for label in pair} - set(labels)
    if unknown:
        raise ValueError(f"labels: {min(map(repr, unknown))} occurs but is not among them")
    return [[pairs[actual, predicted] for predicted in labels] for actual in labels]


def entity_f1(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> EntityScores:
    """Return the F1 of entities from the tags of each text; type and span of an entity must both be correct."""
    predicted: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    actual: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    for text, (prediction, reference) in enumerate(check_paired(predictions, references)):
        if len(prediction) != len(reference):
            raise ValueError(f"text {text}: {len(prediction)} predicted tags, but {len(reference)} reference tags")
        for spans, tags in ((predicted, prediction), (actual, reference)):
            for kind, first, last in entities(tags):
                spans[kind].add((text, first, last))
    kinds = sorted({*predicted, *actual})
    counts = {kind: (len(predicted[kind] & actual[kind]), len(predicted[kind]), len(actual[kind])) for kind in kinds}
    total = _f1(*(sum(count[column] for count in counts.values()) for column in range(3)))
    types = {kind: _f1(*count) for kind, count in counts.items()}
    return EntityScores(total, types, {kind: count[2] for kind, count in counts.items()})


def squad_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> AnswerScores:
    """Return exact match and F1 of SQuAD 2.0, each answer scored against the best of its references.

    A question without references has no answer; only an empty prediction is correct. Case, punctuation, articles and
    extra spaces are ignored.
    """
    pairs = [
        (_normalize(prediction), _normalize_all(answers))
        for prediction, answers in check_paired(predictions, references)
    ]
    exact = sum(prediction in answers for prediction, answers in pairs)
    f1 = math.fsum(max(_word_f1(prediction, answer) for answer in answers) for prediction, answers in pairs)
    return AnswerScores(exact / len(pairs), f1 / len(pairs))


def _label_counts(
    predictions: Sequence[Hashable], references: Sequence[Hashable]
) -> dict[Hashable, tuple[int, int, int]]:
    """Return for each label how often it was correct, predicted and in the references."""
    pairs = check_paired(predictions, references)
    correct = Counter(prediction for prediction, reference in pairs if prediction == reference)
    predicted, actual = Counter(predictions), Counter(references)
    return {label: (correct[label], predicted[label], actual[label]) for label in predicted | actual}


def _f1(correct: int, predicted: int, actual: int) -> F1:
    precision = correct / predicted if predicted else 0.0
    recall = correct / actual if actual else 0.0
    return F1(precision, recall, 2 * correct / (predicted + actual) if correct else 0.0)


def _normalize_all(references: Iterable[str]) -> set[str]:
    if isinstance(references, str):
        raise ValueError(f"{references!r:.40}: give a list of references for each question")
    return {normalized for normalized in map(_normalize, references) if normalized} or {""}


def _normalize(text: str) -> str:
    """Lowercase, and remove ASCII punctuation, English articles and extra spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _word_f1(prediction: str, reference: str) -> float:
    if not prediction or not reference:
        return float(prediction == reference)
    predicted, actual = prediction.split(), reference.split()
    return _f1((Counter(predicted) & Counter(actual)).total(), len(predicted), len(actual)).f1
