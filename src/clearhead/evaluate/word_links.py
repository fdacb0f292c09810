"""Sentence pairs with word links: known ones of the embedded grammar, or estimates by IBM model 1.

P co-occurring word pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.data.grammar import Grammar, Language
from clearhead.text.word_split import split_words

Span = tuple[int, int]  # characters, start to before end
EM_STEPS = 5


class LinkedPair(NamedTuple):
    """A source and a target text, and the character spans of the words that translate each other."""

    source: str
    target: str
    links: tuple[tuple[Span, Span], ...]


def grammar_pairs(
    languages: Sequence[Language],
    level: Literal[1, 2, 3],
    split: Literal["train", "valid", "test"],
    count: int,
    seed: int = 0,
) -> list[LinkedPair]:
    """Sentences of the embedded grammar, whose links are exact."""
    grammar, (source, target) = Grammar(level), (languages[0], languages[-1])
    pairs = []
    for index in range(count):
        example = grammar.example(split, index, seed)
        texts = example.text(source), example.text(target)
        spans = [_spans(example.words(language), text) for language, text in zip((source, target), texts, strict=True)]
        links = tuple((spans[0][i], spans[1][j]) for i, j in example.alignment(source, target))
        pairs.append(LinkedPair(*texts, links))
    return pairs


def _spans(words: Sequence[str], text: str) -> list[Span]:
    """Where the words are in their text."""
    spans, end = list[Span](), 0
    for word in words:
        start = text.index(word, end)
        end = start + len(word)
        spans.append((start, end))
    return spans


def estimate_links(texts: Sequence[tuple[str, str]], count: int) -> list[LinkedPair]:
    """Link the words of the first `count` pairs where IBM model 1 (Brown et al. 1993), trained on all pairs both ways,
    agrees with itself: few links are missing in frequent words, and few are wrong."""
    words = [[split_words(text) for text in pair] for pair in texts]
    ids: list[list[NDArray[np.int64]]] = []
    for side in (0, 1):
        vocabulary: dict[str, int] = {}
        rows = ([pair[side][a:b].lower() for a, b in spans[side]] for pair, spans in zip(texts, words, strict=True))
        ids.append([np.array([vocabulary.setdefault(word, len(vocabulary)) for word in row], np.int64) for row in rows])
    forward, backward = _ibm_model_1(ids[0], ids[1]), _ibm_model_1(ids[1], ids[0])
    pairs = []
    for number, (source, target) in enumerate(texts[:count]):
        table, reverse = forward[number], backward[number].T  # (target words, source words) each
        mutual = (table == table.max(1, keepdims=True, initial=0)) & (
            reverse == reverse.max(0, keepdims=True, initial=0)
        )
        links = [(words[number][0][i], words[number][1][j]) for j, i in zip(*mutual.nonzero(), strict=True)]
        pairs.append(LinkedPair(source, target, tuple(links)))
    return pairs


def _ibm_model_1(sources: list[NDArray[np.int64]], targets: list[NDArray[np.int64]]) -> list[NDArray[np.float64]]:
    """Return p(target word | source word) for the words of every pair, (target words, source words), by EM."""
    shapes = [(len(target), len(source)) for source, target in zip(sources, targets, strict=True)]
    size = 1 + max((int(target.max(initial=0)) for target in targets), default=0)
    keys = np.concatenate(
        [(source[None, :] * size + target[:, None]).ravel() for source, target in zip(sources, targets, strict=True)]
    )
    pair_ids, position = np.unique(keys, return_inverse=True)  # the word pairs (P,), and the pair at each position
    source_of = pair_ids // size
    rows = np.repeat(np.arange(sum(t for t, _ in shapes)), np.concatenate([np.full(t, s) for t, s in shapes]))
    probability = np.ones(len(pair_ids))
    for _ in range(EM_STEPS):
        weights = probability[position]
        posterior = weights / np.bincount(rows, weights)[rows]  # of each source word, given the target word
        counts = np.bincount(position, posterior, len(pair_ids))
        probability = counts / np.bincount(source_of, counts)[source_of]
    ends = np.cumsum([t * s for t, s in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(probability[position], ends[:-1]), shapes, strict=True)]
