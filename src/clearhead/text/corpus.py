"""Files of running text as numbers: words in lower case, sentences cut at . ! ?, rare words left out.

A text is read once, a line at a time, and held as four bytes a word.
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import UserError
from clearhead.files import read_lines

WORD = r"\w+(?:['’]\w+)*"
ENDS = ".!?。！？"
_words = re.compile(WORD)
_words_and_ends = re.compile(f"{WORD}|[{ENDS}]")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return _words.findall(text.lower())


@dataclass(frozen=True)
class Corpus:
    """A text as numbers. The most frequent word has id 0."""

    words: list[str]
    counts: Tensor  # (words,) how often each occurs, int64
    ids: Tensor  # (tokens,) the text, int32
    sentences: Tensor  # (tokens,) the number of the sentence a token stands in, int32
    raw_words: int  # words that were read, the rare ones that were left out included


def read_corpus(paths: Sequence[Path], min_count: int = 5) -> Corpus:
    """The words of files, plain or gzip, that occur at least `min_count` times; a sentence never spans two files."""
    names = ", ".join(map(str, paths))
    return encode((read_lines(path) for path in paths), min_count, names)


def encode(documents: Iterable[Iterable[str]], min_count: int = 5, where: str = "the text") -> Corpus:
    """The words of documents, each given as its lines; a sentence may span lines, but not documents."""
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__  # a new word gets the next number
    ends = [numbers[mark] for mark in ENDS]
    stream = array("i")
    for lines in documents:
        for line in lines:
            stream.extend(map(numbers.__getitem__, _words_and_ends.findall(line.lower())))
        stream.append(0)
    tokens = np.frombuffer(stream, dtype=np.int32)
    counts = np.bincount(tokens, minlength=len(numbers))
    counts[ends] = 0
    raw_words = int(counts.sum())
    if not raw_words:
        raise UserError(f"{where}: there are no words to learn from; give files that are not empty")
    order = np.argsort(-counts, kind="stable")  # equally frequent words in the order of their first appearance
    order = order[counts[order] >= min_count]
    if not len(order):
        raise UserError(
            f"{where}: no word occurs {min_count} times (the most frequent: {counts.max()}); "
            "give more text or a smaller min_count"
        )
    renumber = np.full(len(numbers), -1, dtype=np.int32)
    renumber[order] = np.arange(len(order), dtype=np.int32)
    sentence = np.cumsum(tokens < len(ends), dtype=np.int32)
    ids = renumber[tokens]
    kept = ids >= 0
    spelling = list(numbers)
    return Corpus(
        words=[spelling[number] for number in order],
        counts=torch.from_numpy(counts[order]),
        ids=torch.from_numpy(ids[kept]),
        sentences=torch.from_numpy(sentence[kept]),
        raw_words=raw_words,
    )
