"""Sampling draws from the right distribution, by noise that nothing but seed, place and word decides."""

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from clearhead.inference.sampling import STEP, Sampler, best, gumbel, mix, sample_seeds


def draws(sampler: Sampler, scores: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """How often each word is drawn, by many rows with one seed each."""
    seeds, numbers = torch.arange(count) + seed, torch.zeros(count, dtype=torch.long)
    return torch.bincount(sampler(scores.expand(count, -1), seeds, numbers), minlength=len(scores)) / count


def test_the_hash_is_splitmix64() -> None:
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of its reference code, seed 0
    found = mix(torch.arange(1, 4) * STEP).tolist()
    assert [number % (1 << 64) for number in found] == first


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_words_come_as_often_as_the_softmax_says(temperature: float) -> None:
    scores, count = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, -6.0, -math.inf]), 200_000
    expected = (scores / temperature).softmax(dim=-1)
    found = draws(Sampler(temperature), scores, count)
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_consecutive_tokens_are_drawn_independently() -> None:
    scores, count = torch.zeros(4), 200_000
    seeds = torch.full((count,), 7)
    tokens = Sampler(1.0)(scores.expand(count, -1), seeds, torch.arange(count))  # one row, many places
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16) / (count - 1)
    assert (pairs - 1 / 16).abs().max() < 5 * math.sqrt(1 / 16 / count)


def test_noise_is_that_of_gumbel() -> None:
    noise = gumbel(torch.arange(300), torch.arange(300) % 7, torch.arange(1000)).double().flatten()
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for point in (-1.0, 0.0, 1.0, 3.0, 8.0):
        assert (noise < point).double().mean() == pytest.approx(math.exp(-math.exp(-point)), abs=0.004)


def test_noise_is_the_hash_of_seed_number_and_word() -> None:
    def mixed(x: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> shift)) * factor % 2**64
        return x ^ (x >> 31)

    step, seed, number = 0x9E3779B97F4A7C15, 12345, 7
    key = mixed((mixed(seed) + number * step) % 2**64)
    noise = gumbel(torch.tensor([seed]), torch.tensor([number]), torch.arange(50_000))[0]
    for word in (0, 1, 49_999):
        chance = ((mixed((key + (word + 1) * step) % 2**64) >> 32) + 0.5) / 2**32
        assert noise[word].item() == pytest.approx(-math.log(-math.log(1 - chance)), abs=1e-3)


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 8))
def test_noise_of_a_row_depends_on_nothing_else(seed: int, number: int, words: int, others: int) -> None:
    seeds, numbers = torch.tensor([seed] + [1] * others), torch.tensor([number] + [2] * others)
    assert torch.equal(
        gumbel(seeds, numbers, torch.arange(words + 5))[0, :words],
        gumbel(seeds[:1], numbers[:1], torch.arange(words))[0],
    )


THEIRS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"top_k": 5}, [transformers.TopKLogitsWarper(5)]),
    ({"top_p": 0.8}, [transformers.TopPLogitsWarper(0.8)]),
    ({"min_p": 0.05}, [transformers.MinPLogitsWarper(0.05)]),
    (
        {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
        [
            transformers.TopKLogitsWarper(9),
            transformers.TopPLogitsWarper(0.9),
            transformers.MinPLogitsWarper(0.02),
        ],
    ),
]


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize(("ours", "theirs"), THEIRS, ids=["top-k", "top-p", "min-p", "all"])
def test_words_are_left_out_as_transformers_does(ours: dict[str, Any], theirs: list[Any], temperature: float) -> None:
    scores = 3 * torch.randn(200, 50)
    expected = scores / temperature
    for warper in theirs:
        expected = warper(None, expected)
    found = Sampler(temperature, **ours).narrowed(scores)
    assert found.isneginf().any()
    assert torch.equal(found, expected)


def test_the_best_word_is_never_left_out() -> None:
    scores = torch.randn(20, 30)
    for sampler in (Sampler(1.0, top_k=1), Sampler(1.0, top_p=1e-9), Sampler(1.0, min_p=1.0)):
        assert torch.equal(sampler(scores, torch.arange(20), torch.zeros(20, dtype=torch.long)), scores.argmax(dim=-1))


def test_samples_of_a_row_have_seeds_of_their_own() -> None:
    seeds = sample_seeds([3, 4], 5)
    assert seeds[0] == 3
    assert seeds[5] == 4
    assert len(set(seeds)) == 10
    assert sample_seeds([4], 5) == seeds[5:]


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3000), st.integers(0, 1 << 30), st.booleans())
def test_the_best_continuations_are_those_of_topk(count: int, beams: int, words: int, seed: int, double: bool) -> None:
    draw, dtype = torch.Generator().manual_seed(seed), torch.float64 if double else torch.float32
    scores = torch.randperm(3 * beams * words, generator=draw).view(3, beams, words).to(dtype)  # no two are the same,
    totals = torch.stack([torch.randperm(beams, generator=draw) for _ in range(3)]).to(dtype) / 16  # nor with these
    totals[2, 1:] = -math.inf  # beams that have not begun
    scores[0, :, words // 3 :] = -math.inf  # barred words may be all that is left
    scores[1, -1, -1] = 3 * beams * words  # the last word, in no whole block
    sums, parents, found = best(scores, totals, count)
    whole = (scores + totals[:, :, None]).flatten(1)
    assert torch.equal(sums, whole.topk(min(count, beams * words), dim=1).values)
    assert torch.equal(whole.gather(1, parents * words + found), sums)
    places = (parents * words + found).tolist()
    assert all(len(set(row)) == len(row) for row in places), "no word comes twice"
