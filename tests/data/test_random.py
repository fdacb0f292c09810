"""Stateless randomness: permutations are bijections, draws are uniform and independent."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.data.random import Permutation, hash_ints, randint, uniform


@given(st.integers(1, 3000), st.integers(0, 1 << 62), st.sampled_from([0, 1 << 16]))
@example(1, 0, 0)
@example(2, 0, 0)
@example(70_000, 5, 1 << 16)
@example(1 << 17, 5, 1 << 16)
@example((1 << 17) + 1, 5, 1 << 16)
def test_a_permutation_is_a_bijection(size: int, key: int, table_size: int) -> None:
    class Shuffle(Permutation):
        TABLE_SIZE = table_size  # 0: always the Feistel network

    assert np.array_equal(np.sort(Shuffle(size, key)(np.arange(size))), np.arange(size))


def test_a_permutation_can_be_evaluated_at_single_positions() -> None:
    for size in (50, 100_000):
        shuffled = Permutation(size, 1, 2)(np.arange(size))
        positions = np.array([7, 3, 49, 3])
        assert np.array_equal(Permutation(size, 1, 2)(positions), shuffled[positions])


@pytest.mark.parametrize("table_size", [0, 1 << 16])
def test_every_number_is_equally_likely_at_every_position(table_size: int) -> None:
    class Shuffle(Permutation):
        TABLE_SIZE = table_size

    size, times = 16, 4000
    counts = np.zeros((size, size))
    for key in range(times):
        counts[np.arange(size), Shuffle(size, key)(np.arange(size))] += 1
    expected = times / size
    statistic = ((counts - expected) ** 2 / expected).sum()  # 225 degrees of freedom: mean 225, deviation 21
    assert statistic < 225 + 6 * 21


def test_a_large_shuffle_separates_neighbors() -> None:
    size = 1 << 18
    shuffled = Permutation(size, 3)(np.arange(size))
    assert (np.abs(np.diff(shuffled)) == 1).sum() < 20  # 2 are expected
    assert abs(np.corrcoef(np.arange(size), shuffled)[0, 1]) < 0.01
    assert (shuffled != Permutation(size, 4)(np.arange(size))).mean() > 0.999


def test_draws_are_uniform_and_depend_on_each_argument() -> None:
    numbers = np.arange(100_000)
    for draws in (uniform(1, 2, numbers), uniform(numbers, 2, 1), uniform(1, numbers, numbers)):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts = np.histogram(draws, 100, (0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 6 * 14.1
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(uniform(0, numbers), uniform(1, numbers))[0, 1]) < 0.02
    assert len(np.unique(hash_ints(numbers, 0))) == len(np.unique(hash_ints(0, numbers))) == 100_000
    assert hash_ints(1, 2) != hash_ints(2, 1)
    assert hash_ints(1) != hash_ints(1, 0)


def test_randint_covers_exactly_its_range() -> None:
    assert np.bincount(randint(7, np.arange(70_000))).tolist() == pytest.approx([10_000] * 7, rel=0.05)
    limits = np.array([1, 2, 3])
    assert (randint(limits, np.arange(3000)[:, None]) < limits).all()


def test_hash_ints_is_splitmix64() -> None:
    """Compare with the first output of SplitMix64 in Python integers."""

    def reference(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    for seed in (0, 1, 2**63, 2**64 - 1):
        assert int(hash_ints(seed)) == reference(seed)
    assert int(hash_ints(0)) == 0xE220A8397B1DCDAF
