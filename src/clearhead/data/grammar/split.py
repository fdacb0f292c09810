"""Held-out word combinations: never in train, at least one in every sentence of valid and test.

Pairs of subject and verb, verb and object, adjective and noun are hashed: 5% belong to valid, 5% to test, the rest to
train, for any seed. Valid and test thus measure generalization to new combinations of known words.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal
from zlib import crc32

from clearhead.data.grammar.entries import Name, Noun
from clearhead.data.grammar.example import clauses, phrases
from clearhead.data.grammar.nodes import Clause, Pronoun

Split = Literal["train", "valid", "test"]
SALT = "0"  # chosen so that no word has all its combinations held out
HELD_OUT_PERCENT = 5  # of the pairs, for each of valid and test


def pairs(clause: Clause) -> Iterator[tuple[str, str]]:
    """Yield the word pairs of a sentence, as keys of the lexicon."""
    for part in clauses(clause):
        verb = part.verb.key
        asked = part.mood == "question" and part.gap == "subject"
        for subject in (part.subject.head, part.subject.second and part.subject.second.head):  # Anna and Paul: each
            if not isinstance(subject, (Name, Noun)) or asked:
                continue
            if part.quality:
                yield part.quality.adjective.key, subject.key
            else:
                yield subject.key, verb
        thing = part.object
        if thing and not isinstance(thing.head, Pronoun) and not (part.mood == "question" and part.gap == "object"):
            yield verb, thing.head.key
        for phrase in phrases(part):
            if phrase.adjective and not isinstance(phrase.head, Pronoun):
                yield phrase.adjective.key, phrase.head.key


@lru_cache(maxsize=1 << 17)
def home(pair: tuple[str, str]) -> Split:
    """The split of a word pair."""
    bucket = crc32("\t".join((SALT, *pair)).encode()) % 100
    return "valid" if bucket < HELD_OUT_PERCENT else "test" if bucket < 2 * HELD_OUT_PERCENT else "train"


def belongs(clause: Clause, split: Split) -> bool:
    """Whether a sentence belongs to a split: no pair of another split, and at least one of its own."""
    splits = {home(pair) for pair in pairs(clause)}
    if split == "train":
        return splits <= {"train"}
    return split in splits and splits <= {"train", split}
