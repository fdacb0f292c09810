"""A tag for every word, and the spans that tags make, at their exact places in the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from clearhead.data.labeled_tasks import enclose, first_tokens, frame
from clearhead.model import Documents
from clearhead.predict.encode_batch import (
    InvalidText,
    Row,
    check_length,
    check_text,
    clean,
    head,
    label_names,
    limit,
    read,
)
from clearhead.text.entities import entities, is_entity_scheme
from clearhead.text.word_split import words as words_of

if TYPE_CHECKING:
    from clearhead.predict.model import Model


class Word(NamedTuple):
    """A word at characters `first` to before `behind`, its tag, and how probable that is."""

    text: str
    start: int
    end: int
    tag: str
    score: float


class Span(NamedTuple):
    """Words that belong together, at characters `first` to before `behind`; as probable as the least of them."""

    text: str
    start: int
    end: int
    label: str
    score: float


class Tagged(NamedTuple):
    """A text with its words and the spans among them (tags that are no B-type and I-type: every word is one)."""

    text: str
    words: list[Word]
    spans: list[Span]


def tag(model: Model, texts: Sequence[str | Sequence[str]], spaced: bool = False, cut: bool = False) -> list[Tagged]:
    """The tags of texts, whose words are found, or `spaced`: then spaces and nothing else part them.

    A text that is a list of words keeps them: its text is the words with a space between.
    """
    tags = head(model, "tags", "tag", "tagging")
    names = label_names(model, model.config.labels)
    split = [_split(number, text, spaced) for number, text in enumerate(texts)]
    told = [clean(model, [text[first:behind] for first, behind in places]) for text, places in split]
    found: list[tuple[Row | None, list[int | None]]] = []
    for number, (ours, tokens) in enumerate(
        zip(told, model.tokenizer.offsets_batch(list(map(" ".join, told))), strict=True)
    ):
        if not ours:
            raise InvalidText(number, "empty; give some text")
        check_length(model, number, len(tokens), sum(map(len, ours)), cut=cut)
        if not tokens:  # words that are there, but not for the tokenizer
            found.append((None, []))
            continue
        opens, closes = frame(model.tokenizer)
        kept = tokens[: limit(model) - len(opens) - len(closes)]
        row = Row(*enclose(model.tokenizer, limit(model), [token for token, _, _ in kept]))
        found.append((row, [*[None] * len(opens), *first_tokens(ours, kept), *[None] * len(closes)]))

    def each(hidden: Tensor, documents: Documents, chosen: list[int]) -> list[tuple[list[float], list[int]]]:
        best = tags(hidden[0]).float().softmax(-1).max(-1)
        sizes = documents.lengths.tolist()
        pairs = zip(best.values.cpu().split(sizes), best.indices.cpu().split(sizes), strict=True)
        return [(scores.tolist(), numbers.tolist()) for scores, numbers in pairs]

    answers = iter(read(model, [row for row, _ in found if row is not None], each))
    outside = ("O" if "O" in names else names[0], 0.0)  # of a word behind the cut, or one without any token
    tagged = []
    for (text, places), (seen, firsts) in zip(split, found, strict=True):
        scores, numbers = ([], []) if seen is None else next(answers)
        said = {word: (names[n], s) for word, n, s in zip(firsts, numbers, scores, strict=True) if word is not None}
        words = [Word(text[a:b], a, b, *said.get(n, outside)) for n, (a, b) in enumerate(places)]
        tagged.append(Tagged(text, words, _spans(text, words, is_entity_scheme(names))))
    return tagged


def _split(number: int, text: str | Sequence[str], spaced: bool) -> tuple[str, list[tuple[int, int]]]:
    """A text and the places of its words."""
    if isinstance(text, str | bytes) or not isinstance(text, Iterable):
        check_text(number, text)
        return text, [word.span() for word in re.finditer(r"\S+", text)] if spaced else words_of(text)
    places, first = [], 0
    for word in text:
        check_text(number, word, "a word: ")
        places.append((first, first + len(word)))
        first += len(word) + 1
    return " ".join(text), places


def _spans(text: str, words: list[Word], typed: bool) -> list[Span]:
    if not typed:
        return [Span(word.text, word.start, word.end, word.tag, word.score) for word in words]
    found = []
    for label, first, last in entities([word.tag for word in words]):
        begin, behind = words[first].start, words[last].end
        score = min(word.score for word in words[first : last + 1])
        found.append(Span(text[begin:behind], begin, behind, label, score))
    return found
