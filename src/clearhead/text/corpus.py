"""Encode text files for word2vec: lowercased words, sentences split at . ! ?, rare words dropped.

Text is read line by line and stored in four bytes per word.
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
from clearhead.limits import CHARS_PER_WORD, MAX_WORDS

WORD = r"\w+(?:['’]\w+)*"
SENTENCE_ENDS = ".!?。！？"
_words = re.compile(WORD)
_words_and_ends = re.compile(f"{WORD}|[{SENTENCE_ENDS}]")


def lowercase_words(text: str) -> list[str]:
    """Split a text into lowercased words without punctuation."""
    return _words.findall(text.lower())


@dataclass(frozen=True)
class Corpus:
    """A text as word ids; the most frequent word has id 0. V vocabulary · T words of the text."""

    vocab: list[str]
    counts: Tensor  # (V,) int64
    ids: Tensor  # (T,) int32
    sentences: Tensor  # (T,) int32, the index of each word's sentence
    total_words: int  # including dropped rare words


def read_corpus(paths: Sequence[Path], min_count: int = 5) -> Corpus:
    """Encode files, plain or gzip, dropping words that occur fewer than `min_count` times."""
    names = ", ".join(map(str, paths))
    return encode((read_lines(path) for path in paths), min_count, names)


def encode(documents: Iterable[Iterable[str]], min_count: int = 5, where: str = "the text") -> Corpus:
    """Encode documents given as lines; a sentence can span lines, but not documents."""
    word_ids: defaultdict[str, int] = defaultdict()
    word_ids.default_factory = word_ids.__len__  # a new word gets the next id
    end_ids = [word_ids[mark] for mark in SENTENCE_ENDS]
    stream, chars = array("i"), 0
    for lines in documents:
        for line in lines:
            chars += len(line)
            if len(word_ids) > MAX_WORDS + chars // CHARS_PER_WORD:
                raise UserError(
                    f"{where}: {len(word_ids):,} different words in {chars:,} characters; give natural text"
                )
            stream.extend(map(word_ids.__getitem__, _words_and_ends.findall(line.lower())))
        stream.append(0)
    tokens = np.frombuffer(stream, dtype=np.int32)
    counts = np.bincount(tokens, minlength=len(word_ids))
    counts[end_ids] = 0
    total_words = int(counts.sum())
    if not total_words:
        raise UserError(f"{where}: no words to train on; give files that are not empty")
    order = np.argsort(-counts, kind="stable")  # ties in the order of first occurrence
    order = order[counts[order] >= min_count]
    if not len(order):
        raise UserError(
            f"{where}: no word occurs {min_count} times (highest count: {counts.max()}); "
            "give more text or lower min_count"
        )
    new_ids = np.full(len(word_ids), -1, dtype=np.int32)
    new_ids[order] = np.arange(len(order), dtype=np.int32)
    sentences = np.cumsum(tokens < len(end_ids), dtype=np.int32)
    ids = new_ids[tokens]
    kept = ids >= 0
    all_words = list(word_ids)
    return Corpus(
        vocab=[all_words[old_id] for old_id in order],
        counts=torch.from_numpy(counts[order]),
        ids=torch.from_numpy(ids[kept]),
        sentences=torch.from_numpy(sentences[kept]),
        total_words=total_words,
    )
