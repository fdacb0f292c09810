"""Random access to the sentences of the grammar by split and index."""

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
    """Parallel English, German and Chinese sentences; level 1 is the smallest, 3 the full grammar."""

    def __init__(self, level: Level = 3) -> None:
        if level not in get_args(Level):
            raise ValueError(f"level: {level!r} is not allowed; use 1, 2 or 3")
        self.level: Level = level
        self._pools = _pools(level)

    def lemmas(self, language: Language) -> frozenset[str]:
        """Return the lemmas of the content words of the level."""
        return lemmas(self._pools.lexicon, language)

    def example(self, split: Split, index: int, seed: int = 0) -> Example:
        """Return sentence `index` of a split, a pure function of the arguments."""
        if split not in get_args(Split):
            raise ValueError(f"split: {split!r} is not allowed; use train, valid or test")
        dice = Random(f"{seed} {split} {index}")
        while not belongs(clause := draw(self._pools, dice), split):
            pass
        return Example(clause)
