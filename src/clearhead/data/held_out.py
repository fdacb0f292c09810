"""The held-out pairs of translation data: those without a near-duplicate in the training data.

Many sources have the same target, and many sentences differ in one word: with a split by source alone, a model would
be scored on what it was trained on.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from clearhead.config.data import Corpus, DataConfig
from clearhead.data.cleaning import check_text, chunks, hash64, hash_fraction, normalize_text
from clearhead.data.formats import Record
from clearhead.text.word_split import CJK_RANGES

Hashes = NDArray[np.uint64]

MIN_WORDS = 4  # with fewer words, near-duplicates have equal words
MIN_SHARE = 0.1  # of the pairs that are split off by source; where fewer remain, all are held out
_CJK = "".join(f"{chr(low)}-{chr(high)}" for low, high in CJK_RANGES)
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


def held_out_pairs(
    config: DataConfig, read: Callable[[Corpus], Iterator[Record]], log: Callable[[str], None] = lambda line: None
) -> list[list[Record]]:
    """Return the held-out records of each training corpus, which `read` reads; only these are kept in memory.

    `held_out` splits by source. Of the pairs split off, those are held out whose source and target have no
    near-duplicate in the training data; the others are not used. If hardly any remain, as in data made of templates,
    all are held out.
    """
    split_off = [[each for each in _checked(read(corpus)) if is_split_off(each, config)] for corpus in config.train]
    records = list(chain.from_iterable(split_off))
    if not records:
        return split_off
    sides = [near_hashes([record.values[side] for record in records]) for side in (0, 1)]
    known = [np.unique(hashes) for hashes, _ in sides]
    seen = [np.zeros(len(hashes), bool) for hashes in known]
    for chunk in chunks(chain.from_iterable(map(read, config.train))):
        training = [record for record in _checked(chunk) if not is_split_off(record, config)]
        for side in (0, 1):
            hashes = near_hashes([record.values[side] for record in training])[0]
            index = np.minimum(np.searchsorted(known[side], hashes), len(known[side]) - 1)
            seen[side][index[known[side][index] == hashes]] = True
    is_near = np.zeros(len(records), bool)
    for side, (hashes, owners) in enumerate(sides):
        is_near[owners[seen[side][np.searchsorted(known[side], hashes)]]] = True
    left = int(np.count_nonzero(~is_near))
    if left < MIN_SHARE * len(records):
        log(f"held out {len(records):,} pairs, nearly all of them with a near-duplicate in the training data")
        return split_off
    log(f"held out {left:,} pairs; {len(records) - left:,} others have a near-duplicate in the training data")
    flags = iter(is_near.tolist())
    return [[record for record in part if not next(flags)] for part in split_off]


def near_hashes(texts: Sequence[str]) -> tuple[Hashes, NDArray[np.intp]]:
    """Return hashes and the index of each one's text; near-duplicates have a hash in common.

    Near-duplicates have the same words in any order, or all but one of at least MIN_WORDS. Case, punctuation and
    spaces do not matter; a Chinese character is a word. The hashes are sums over the words of a text, and over all
    but one of them.
    """
    words = [_WORD.findall(unicodedata.normalize("NFKC", text).casefold()) or [text] for text in texts]
    owners = np.arange(len(words))
    if not words:
        return np.zeros(0, np.uint64), owners
    lengths = np.array([len(each) for each in words])
    word_hashes = np.fromiter(map(_word_hash, chain.from_iterable(words)), np.uint64, lengths.sum())
    totals = np.add.reduceat(word_hashes, np.cumsum(lengths) - lengths)  # modulo 2^64
    word_owners = np.repeat(owners, lengths)
    is_long = lengths[word_owners] >= MIN_WORDS
    word_owners = word_owners[is_long]
    rests = totals[word_owners] - word_hashes[is_long]
    return np.concatenate([totals, rests]), np.concatenate([owners, word_owners])


@lru_cache(maxsize=1 << 18)
def _word_hash(word: str) -> int:
    return hash64(word)


def _checked(records: Iterator[Record] | list[Record]) -> Iterator[Record]:
    for record in records:
        for value in record.values:
            check_text(record, value)
        yield record


def is_split_off(record: Record, config: DataConfig) -> bool:
    """Whether the source is held out, as in `Cleaner`."""
    return hash_fraction(normalize_text(record.values[0], config)) < config.held_out
