"""A tag for every word, and the spans that tags form, at character positions of the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from clearhead.data.labeled_tasks import add_special_tokens, first_token_words, special_prefix_suffix
from clearhead.model import Documents
from clearhead.predict.encode_batch import (
    InvalidText,
    Row,
    check_length,
    check_text,
    encode_packed,
    get_head,
    label_names,
    max_length,
    normalize_texts,
)
from clearhead.predict.results import Span, TaggedWord, Tagging
from clearhead.text.entities import entities, is_bio_scheme
from clearhead.text.word_split import split_words as words_of

if TYPE_CHECKING:
    from clearhead.predict.model import Model


def tag(
    model: Model, texts: Sequence[str | Sequence[str]], pretokenized: bool = False, truncate: bool = False
) -> list[Tagging]:
    """Tag texts; words are split by rule or, if `pretokenized`, by spaces alone.

    A text given as a list of words keeps them: its text is the words joined by spaces.
    """
    tags = get_head(model, "tags", "tag", "tagging")
    names = label_names(model, model.config.labels)
    split = [_split(number, text, pretokenized) for number, text in enumerate(texts)]
    cleaned = [normalize_texts(model, [text[start:end] for start, end in spans]) for text, spans in split]
    rows: list[tuple[Row | None, list[int | None]]] = []  # the word of which each token is the first
    for number, (words, tokens) in enumerate(
        zip(cleaned, model.tokenizer.offsets_batch(list(map(" ".join, cleaned))), strict=True)
    ):
        if not words:
            raise InvalidText(number, "empty; give some text")
        check_length(model, number, len(tokens), sum(map(len, words)), truncate=truncate)
        if not tokens:  # words for which the tokenizer has no token
            rows.append((None, []))
            continue
        opens, closes = special_prefix_suffix(model.tokenizer)
        kept = tokens[: max_length(model) - len(opens) - len(closes)]
        encoded = Row(*add_special_tokens(model.tokenizer, max_length(model), [token for token, _, _ in kept]))
        rows.append((encoded, [*[None] * len(opens), *first_token_words(words, kept), *[None] * len(closes)]))

    def predict(hidden: Tensor, documents: Documents, numbers: list[int]) -> list[tuple[list[float], list[int]]]:
        best = tags(hidden[0]).float().softmax(-1).max(-1)
        sizes = documents.lengths.tolist()
        pairs = zip(best.values.cpu().split(sizes), best.indices.cpu().split(sizes), strict=True)
        return [(scores.tolist(), labels.tolist()) for scores, labels in pairs]

    predictions = iter(encode_packed(model, [row for row, _ in rows if row is not None], predict))
    outside = ("O" if "O" in names else names[0], 0.0)  # of a truncated word, or one without a token
    results = []
    for (text, spans), (row, word_of_token) in zip(split, rows, strict=True):
        scores, labels = ([], []) if row is None else next(predictions)
        predicted = {
            word: (names[label], score)
            for word, label, score in zip(word_of_token, labels, scores, strict=True)
            if word is not None
        }
        tagged = tuple(
            TaggedWord(text[start:end], start, end, *predicted.get(n, outside)) for n, (start, end) in enumerate(spans)
        )
        results.append(Tagging(text, tagged, _spans(text, tagged, is_bio_scheme(names))))
    return results


def _split(number: int, text: str | Sequence[str], pretokenized: bool) -> tuple[str, list[tuple[int, int]]]:
    """A text and the spans of its words."""
    if isinstance(text, str | bytes) or not isinstance(text, Iterable):
        check_text(number, text)
        return text, [word.span() for word in re.finditer(r"\S+", text)] if pretokenized else words_of(text)
    spans, start = [], 0
    for word in text:
        check_text(number, word, "a word: ")
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return " ".join(text), spans


def _spans(text: str, words: Sequence[TaggedWord], has_entities: bool) -> tuple[Span, ...]:
    if not has_entities:
        return tuple(Span(word.text, word.start, word.end, word.tag, word.score) for word in words)
    spans = []
    for label, first, last in entities([word.tag for word in words]):
        start, end = words[first].start, words[last].end
        score = min(word.score for word in words[first : last + 1])
        spans.append(Span(text[start:end], start, end, label, score))
    return tuple(spans)
