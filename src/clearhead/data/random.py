"""Stateless randomness: every draw is a hash of integers, so no generator state has to be saved.

The masks of a sample, for example, depend on (seed, epoch, sample) and not on its batch, worker or process.
"""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.uint64]
# Constants of SplitMix64: the golden ratio increment and two multipliers
_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def hash_ints(*values: int | NDArray[np.integer]) -> Integers:
    """Hash integers (numbers or arrays that broadcast) to 64 bits: SplitMix64, absorbing one value at a time."""
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            state = (state ^ np.asarray(value).astype(np.uint64)) + _GOLDEN
            state = (state ^ (state >> np.uint64(30))) * _MIX1
            state = (state ^ (state >> np.uint64(27))) * _MIX2
            state = state ^ (state >> np.uint64(31))
    return state


def uniform(*values: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """Return uniform draws from [0, 1), one per hash of `values`."""
    return (hash_ints(*values) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def randint(limit: int | NDArray[np.integer], *values: int | NDArray[np.integer]) -> NDArray[np.int64]:
    """Return uniform integers from 0 to limit - 1."""
    return (uniform(*values) * limit).astype(np.int64)


class Permutation:
    """A random permutation of 0 … size - 1, evaluated per index with O(1) memory.

    A Feistel network permutes the next power of two; results outside the range are permuted again until inside.
    Below TABLE_SIZE its halves are too short to mix well, so small permutations are a table sorted by hash.
    """

    ROUNDS, TABLE_SIZE = 6, 1 << 16

    def __init__(self, size: int, *key: int):
        self.size, self.key = size, int(hash_ints(*key))
        bits = max(2, (size - 1).bit_length())
        self.low, self.high = bits // 2, bits - bits // 2
        self.table = (
            np.argsort(hash_ints(self.key, np.arange(size)), kind="stable") if size <= self.TABLE_SIZE else None
        )

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers at these positions of the shuffled order."""
        if self.table is not None:
            return self.table[positions]
        numbers = self._feistel(positions.astype(np.uint64))
        outside = numbers >= self.size
        while outside.any():
            numbers[outside] = self._feistel(numbers[outside])
            outside = numbers >= self.size
        return numbers.astype(np.int64)

    def _feistel(self, numbers: Integers) -> Integers:
        low, high = self.low, self.high
        for round_ in range(self.ROUNDS):
            left, right = numbers >> np.uint64(low), numbers & np.uint64((1 << low) - 1)
            left = (left ^ hash_ints(self.key, round_, right)) & np.uint64((1 << high) - 1)
            numbers = (right << np.uint64(high)) | left  # swap the halves
            low, high = high, low
        return numbers
