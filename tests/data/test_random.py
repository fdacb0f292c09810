"""Randomness that is a function: bijections, even draws, nothing that repeats where it should not."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.data.random import Permutation, below, hash_ints, uniform


@given(st.integers(1, 3000), st.integers(0, 1 << 62), st.sampled_from([0, 1 << 16]))
@example(1, 0, 0)
@example(2, 0, 0)
@example(70_000, 5, 1 << 16)
@example(1 << 17, 5, 1 << 16)
@example((1 << 17) + 1, 5, 1 << 16)
def test_a_permutation_has_every_number_once(size: int, key: int, small: int) -> None:
    class Shuffle(Permutation):
        SMALL = small  # 0: even the smallest goes through the network

    assert np.array_equal(np.sort(Shuffle(size, key)(np.arange(size))), np.arange(size))


def test_a_place_is_worked_out_without_the_others() -> None:
    for size in (50, 100_000):
        whole = Permutation(size, 1, 2)(np.arange(size))
        places = np.array([7, 3, 49, 3])
        assert np.array_equal(Permutation(size, 1, 2)(places), whole[places])


@pytest.mark.parametrize("small", [0, 1 << 16])
def test_every_number_is_as_likely_at_every_place(small: int) -> None:
    class Shuffle(Permutation):
        SMALL = small

    size, times = 16, 4000
    counts = np.zeros((size, size))
    for key in range(times):
        counts[np.arange(size), Shuffle(size, key)(np.arange(size))] += 1
    expected = times / size
    statistic = ((counts - expected) ** 2 / expected).sum()  # 225 degrees of freedom: mean 225, deviation 21
    assert statistic < 225 + 6 * 21


def test_a_large_shuffle_leaves_no_neighbors_together() -> None:
    size = 1 << 18
    shuffled = Permutation(size, 3)(np.arange(size))
    assert (np.abs(np.diff(shuffled)) == 1).sum() < 20  # 2 are expected
    assert abs(np.corrcoef(np.arange(size), shuffled)[0, 1]) < 0.01
    assert (shuffled != Permutation(size, 4)(np.arange(size))).mean() > 0.999


def test_draws_are_even_and_each_argument_counts() -> None:
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


def test_draws_below_a_limit_reach_all_of_it_and_no_more() -> None:
    assert np.bincount(below(7, np.arange(70_000))).tolist() == pytest.approx([10_000] * 7, rel=0.05)
    limits = np.array([1, 2, 3])
    assert (below(limits, np.arange(3000)[:, None]) < limits).all()


def test_bits_are_those_of_splitmix() -> None:
    """The first outputs of SplitMix64 seeded with 0 and 1, worked out with Python's integers."""

    def reference(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    for seed in (0, 1, 2**63, 2**64 - 1):
        assert int(hash_ints(seed)) == reference(seed)
    assert int(hash_ints(0)) == 0xE220A8397B1DCDAF
