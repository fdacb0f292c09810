"""Which combinations of words are held out: never in train, at least one in every sentence of valid and test.

The pairs subject and verb, verb and object, adjective and noun are hashed. A few of a hundred belong to valid, as many
to test, the rest to train, for any seed. So valid and test ask for what has never been seen together, while each word
alone is known.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal
from zlib import crc32

from clearhead.data.grammar.entries import Name, Noun
from clearhead.data.grammar.example import clauses, phrases
from clearhead.data.grammar.nodes import Clause, Pronoun

Split = Literal["train", "valid", "test"]
SALT = "0"  # chosen so that no word has all its partners held out
SHARE = 5  # percent of the pairs that valid holds out, and test again


def pairs(clause: Clause) -> Iterator[tuple[str, str]]:
    """The combinations in a sentence, as keys of the lexicon."""
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
    """The split that a combination belongs to."""
    bucket = crc32("\t".join((SALT, *pair)).encode()) % 100
    return "valid" if bucket < SHARE else "test" if bucket < 2 * SHARE else "train"


def belongs(clause: Clause, split: Split) -> bool:
    """Whether a sentence may stand in a split: it has nothing held out for another, and something for its own."""
    homes = {home(pair) for pair in pairs(clause)}
    if split == "train":
        return homes <= {"train"}
    return split in homes and homes <= {"train", split}
