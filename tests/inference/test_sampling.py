"""Sampling follows the softmax, with noise that depends only on seed, position and token."""

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from clearhead.inference.sampling import (
    INCREMENT,
    Sampler,
    argmax,
    gumbel_noise,
    sample_seeds,
    splitmix64,
)


def token_rates(sampler: Sampler, logits: torch.Tensor, count: int) -> torch.Tensor:
    """How often each token is sampled, over `count` rows with different seeds."""
    seeds, num_new = torch.arange(count), torch.zeros(count, dtype=torch.long)
    return torch.bincount(sampler(logits.expand(count, -1), seeds, num_new), minlength=len(logits)) / count


def test_the_hash_is_splitmix64() -> None:
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of the reference code with seed 0
    hashes = splitmix64(torch.arange(1, 4) * INCREMENT).tolist()
    assert [x % (1 << 64) for x in hashes] == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_sampled_with_the_probabilities_of_the_softmax(temperature: float) -> None:
    logits, count = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, -6.0, -math.inf]), 200_000
    expected = (logits / temperature).softmax(dim=-1)
    rates = token_rates(Sampler(temperature), logits, count)
    assert ((rates - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_consecutive_tokens_are_sampled_independently() -> None:
    logits, count = torch.zeros(4), 200_000
    seeds = torch.full((count,), 7)
    tokens = Sampler(1.0)(logits.expand(count, -1), seeds, torch.arange(count))  # one seed, many positions
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16) / (count - 1)
    assert (pairs - 1 / 16).abs().max() < 5 * math.sqrt(1 / 16 / count)


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.arange(300), torch.arange(300) % 7, torch.arange(1000)).double().flatten()
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for point in (-1.0, 0.0, 1.0, 3.0, 8.0):
        assert (noise < point).double().mean() == pytest.approx(math.exp(-math.exp(-point)), abs=0.004)


def test_noise_is_a_hash_of_seed_position_and_token() -> None:
    def mix(x: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> shift)) * factor % 2**64
        return x ^ (x >> 31)

    increment, seed, position = 0x9E3779B97F4A7C15, 12345, 7
    key = mix((mix(seed) + position * increment) % 2**64)
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), torch.arange(50_000))[0]
    for token in (0, 1, 49_999):
        uniform = ((mix((key + (token + 1) * increment) % 2**64) >> 32) + 0.5) / 2**32
        assert noise[token].item() == pytest.approx(-math.log(-math.log(1 - uniform)), abs=1e-3)


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 8))
def test_noise_of_a_row_depends_on_nothing_else(seed: int, position: int, vocab_size: int, others: int) -> None:
    seeds, positions = torch.tensor([seed] + [1] * others), torch.tensor([position] + [2] * others)
    assert torch.equal(
        gumbel_noise(seeds, positions, torch.arange(vocab_size + 5))[0, :vocab_size],
        gumbel_noise(seeds[:1], positions[:1], torch.arange(vocab_size))[0],
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
def test_top_k_top_p_and_min_p_equal_the_warpers_of_transformers(
    ours: dict[str, Any], theirs: list[Any], temperature: float
) -> None:
    logits = 3 * torch.randn(200, 50)
    expected = logits / temperature
    for warper in theirs:
        expected = warper(None, expected)
    filtered = Sampler(temperature, **ours).filter_logits(logits)
    assert filtered.isneginf().any()
    assert torch.equal(filtered, expected)


def test_the_most_likely_token_is_always_kept() -> None:
    logits = torch.randn(20, 30)
    for sampler in (Sampler(1.0, top_k=1), Sampler(1.0, top_p=1e-9), Sampler(1.0, min_p=1.0)):
        assert torch.equal(sampler(logits, torch.arange(20), torch.zeros(20, dtype=torch.long)), logits.argmax(dim=-1))


def test_samples_of_a_row_have_different_seeds() -> None:
    seeds = sample_seeds([3, 4], 5)
    assert seeds[0] == 3
    assert seeds[5] == 4
    assert len(set(seeds)) == 10
    assert sample_seeds([4], 5) == seeds[5:]


@given(st.integers(1, 3000), st.integers(0, 1 << 30))
def test_argmax_equals_torch_and_returns_the_first_of_ties(vocab_size: int, seed: int) -> None:
    logits = torch.randint(9, (4, vocab_size), generator=torch.Generator().manual_seed(seed)).float()
    first = (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    assert torch.equal(argmax(logits), first)
