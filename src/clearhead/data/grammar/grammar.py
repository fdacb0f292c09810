"""The grammar as a corpus: sentence number `index` of a split, made on the spot."""

from functools import cache
from random import Random
from typing import Literal, get_args

from clearhead.data.grammar.entries import Language, lemmas, load
from clearhead.data.grammar.example import Example
from clearhead.data.grammar.phrases import Pools
from clearhead.data.grammar.plans import draw
from clearhead.data.grammar.split import Split, belongs

Level = Literal[1, 2, 3]


@cache
def _pools(level: Level) -> Pools:
    return Pools(load(level), level)


class Grammar:
    """English, German and Chinese sentences that say the same; level 1 is small, 3 everything."""

    def __init__(self, level: Level = 3) -> None:
        if level not in get_args(Level):
            raise ValueError(f"level {level!r}: the grammar has the levels 1, 2 and 3")
        self.level: Level = level
        self._pools = _pools(level)

    def lemmas(self, language: Language) -> frozenset[str]:
        """The dictionary forms of the content words of the level."""
        return lemmas(self._pools.lexicon, language)

    def example(self, split: Split, index: int, seed: int = 0) -> Example:
        """Sentence `index` of a split: always the same for the same arguments."""
        if split not in get_args(Split):
            raise ValueError(f"split {split!r}: expected train, valid or test")
        dice = Random(f"{seed} {split} {index}")
        while not belongs(clause := draw(self._pools, dice), split):
            pass
        return Example(clause)
