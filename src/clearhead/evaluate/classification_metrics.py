"""How right labels, values, tags and answers are, as shares of 1 and correlations; nothing to divide by gives 0.

Everywhere, the first list is what the model said and the second, of the same length, what was expected.
"""

import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from clearhead.text.correlation import paired
from clearhead.text.entities import entities

A = TypeVar("A")
B = TypeVar("B")


class F1(NamedTuple):
    """Of what was said, the share that is right; of what is true, the share that was said; their harmonic mean."""

    precision: float
    recall: float
    f1: float


class Entities(NamedTuple):
    """Scores over all entities, for each type, and how many of each type there truly are."""

    all: F1
    types: dict[str, F1]
    counts: dict[str, int]


class Answers(NamedTuple):
    """The share of answers that match exactly, and the mean share of words in common."""

    exact: float
    f1: float


def accuracy(outputs: Sequence[Hashable], references: Sequence[Hashable]) -> float:
    """The share of equal labels."""
    pairs = paired(outputs, references)
    return sum(output == reference for output, reference in pairs) / len(pairs)


def binary_f1(outputs: Sequence[Hashable], references: Sequence[Hashable], positive: Hashable) -> F1:
    """Scores of one label against all others."""
    pairs = paired(outputs, references)
    right = sum(output == reference == positive for output, reference in pairs)
    return _f1(right, sum(o == positive for o, _ in pairs), sum(r == positive for _, r in pairs))


def macro_f1(outputs: Sequence[Hashable], references: Sequence[Hashable]) -> F1:
    """Means over all labels that were said or are true, each weighing the same."""
    found = [_f1(*counts) for counts in _counts(outputs, references).values()]
    return F1(*(math.fsum(values) / len(found) for values in zip(*found, strict=True)))


def micro_f1(outputs: Sequence[Hashable], references: Sequence[Hashable]) -> F1:
    """Scores of all labels counted together; with one label each, all three are the accuracy."""
    return _f1(*(sum(column) for column in zip(*_counts(outputs, references).values(), strict=True)))


def matthews(outputs: Sequence[Hashable], references: Sequence[Hashable]) -> float:
    """Matthews correlation of two or more classes: 1 all right, 0 no better than chance, −1 (of two) all wrong."""
    counts = _counts(outputs, references).values()
    total, right = len(outputs), sum(count[0] for count in counts)
    both = sum(said * true for _, said, true in counts)
    said = total**2 - sum(count[1] ** 2 for count in counts)
    true = total**2 - sum(count[2] ** 2 for count in counts)
    return (total * right - both) / math.sqrt(said * true) if said and true else 0.0


def confusion(
    outputs: Sequence[Hashable], references: Sequence[Hashable], labels: Sequence[Hashable]
) -> list[list[int]]:
    """How often each true label (row) was called each label (column), in the order of `labels`."""
    pairs = Counter(paired(references, outputs))
    strangers = {label for pair in pairs for label in pair} - set(labels)
    if strangers:
        raise ValueError(f"labels: {min(map(repr, strangers))} occurs but is not among them")
    return [[pairs[true, said] for said in labels] for true in labels]


def entity_f1(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Entities:
    """An entity is right when its type and both its ends are; a list of tags for each text."""
    said: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    true: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    for text, (output, reference) in enumerate(paired(outputs, references)):
        if len(output) != len(reference):
            raise ValueError(f"text {text}: {len(output)} tags were said and {len(reference)} are true")
        for side, tags in ((said, output), (true, reference)):
            for kind, first, last in entities(tags):
                side[kind].add((text, first, last))
    counts = {kind: (len(said[kind] & true[kind]), len(said[kind]), len(true[kind])) for kind in sorted({*said, *true})}
    total = _f1(*(sum(count[column] for count in counts.values()) for column in range(3)))
    return Entities(
        total, {kind: _f1(*count) for kind, count in counts.items()}, {kind: count[2] for kind, count in counts.items()}
    )


def answers(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Answers:
    """Exact match and F1 of SQuAD 2.0: the best of each question's references counts.

    A question without references has no answer; only an empty output is right there. Case, punctuation, articles and
    spaces do not count.
    """
    pairs = [(_plain(output), _expected(several)) for output, several in paired(outputs, references)]
    exact = sum(output in several for output, several in pairs)
    shared = math.fsum(max(_words_f1(output, one) for one in several) for output, several in pairs)
    return Answers(exact / len(pairs), shared / len(pairs))


def _counts(outputs: Sequence[Hashable], references: Sequence[Hashable]) -> dict[Hashable, tuple[int, int, int]]:
    """How often each label was right, was said and is true."""
    right = Counter(output for output, reference in paired(outputs, references) if output == reference)
    said, true = Counter(outputs), Counter(references)
    return {label: (right[label], said[label], true[label]) for label in said | true}


def _f1(right: int, said: int, true: int) -> F1:
    return F1(right / said if said else 0.0, right / true if true else 0.0, 2 * right / (said + true) if right else 0.0)


def _expected(references: Iterable[str]) -> set[str]:
    if isinstance(references, str):
        raise ValueError(f"{references!r:.40}: give a list of references for each question")
    return {plain for plain in map(_plain, references) if plain} or {""}


def _plain(text: str) -> str:
    """Lower case, without punctuation (ASCII's), English articles and superfluous spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _words_f1(output: str, reference: str) -> float:
    if not output or not reference:
        return float(output == reference)
    said, true = output.split(), reference.split()
    return _f1((Counter(said) & Counter(true)).total(), len(said), len(true)).f1
