"""Randomness without a state: every draw is a function of integers, so that a position is all there is to store.

A sample's masks depend on (seed, epoch, sample), never on the batch, the worker or the process it comes through.
"""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.uint64]
_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def hash_ints(*values: int | NDArray[np.integer]) -> Integers:
    """A hash of integers, numbers or arrays that go together: 64 well-mixed bits (SplitMix64, absorbed in turn)."""
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            state = (state ^ np.asarray(value).astype(np.uint64)) + _GOLDEN
            state = (state ^ (state >> np.uint64(30))) * _FIRST
            state = (state ^ (state >> np.uint64(27))) * _SECOND
            state = state ^ (state >> np.uint64(31))
    return state


def uniform(*values: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """Draws from [0, 1), one for each hash of `values`."""
    return (hash_ints(*values) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(limit: int | NDArray[np.integer], *values: int | NDArray[np.integer]) -> NDArray[np.int64]:
    """Draws from 0 … limit - 1."""
    return (uniform(*values) * limit).astype(np.int64)


class Permutation:
    """A shuffle of 0 … size - 1 that is computed where it is asked, so that it needs no memory however large it is.

    A Feistel network permutes the next power of two; what falls outside is sent through again until it is inside.
    Below SMALL numbers the halves of such a network are too short to mix well, so those are sorted by a hash instead.
    """

    ROUNDS, SMALL = 6, 1 << 16

    def __init__(self, size: int, *key: int):
        self.size, self.key = size, int(hash_ints(*key))
        bits = max(2, (size - 1).bit_length())
        self.low, self.high = bits // 2, bits - bits // 2
        self.table = np.argsort(hash_ints(self.key, np.arange(size)), kind="stable") if size <= self.SMALL else None

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers that come at `places` of the shuffled order."""
        if self.table is not None:
            return self.table[places]
        found = self._once(places.astype(np.uint64))
        outside = found >= self.size
        while outside.any():
            found[outside] = self._once(found[outside])
            outside = found >= self.size
        return found.astype(np.int64)

    def _once(self, numbers: Integers) -> Integers:
        low, high = self.low, self.high
        for turn in range(self.ROUNDS):
            left, right = numbers >> np.uint64(low), numbers & np.uint64((1 << low) - 1)
            left = (left ^ hash_ints(self.key, turn, right)) & np.uint64((1 << high) - 1)
            numbers = (right << np.uint64(high)) | left  # the halves change places
            low, high = high, low
        return numbers
