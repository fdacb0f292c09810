"""Random generative models, random rows for them, and a comparison of outputs."""

import random
from typing import Any

import pytest
import torch
from hypothesis import assume, currently_in_test_context, settings

from clearhead.config import ModelConfig
from clearhead.model import build
from tests.inference.reference import BEGIN, Row
from tests.strategies import VOCABULARY, configs, network_of

FEW = settings(max_examples=max(1, settings().max_examples // 4))  # a search runs the network many times
generative_configs = configs(families=("encoder-decoder", "decoder"))
TEXTS = ["The cat sat on the mat, and the dog sat on the cat.", "Ärger über Öl!", "猫坐在垫子上。狗坐在猫上。"] * 20


def random_model(config: ModelConfig) -> Any:
    """A random network whose logits have a standard deviation of 2, so that EOS is neither rare nor certain."""
    network = network_of(config)
    lm_head = network.heads.lm_head.proj
    with torch.no_grad():
        ids = torch.randint(VOCABULARY, (8, 6))
        logits = network(ids, ids) if config.family == "encoder-decoder" else network(ids)
        deviations = logits.std(dim=-1)
        if currently_in_test_context():  # else rounding chooses the tokens
            assume(deviations.min() > max(1e-6, 1e-2 * deviations.mean()))
        lm_head.weight.mul_(2 / deviations.mean())
    return network


def random_network(family: str, vocab_size: int, **layers: int) -> Any:
    """A random network in float64 whose outputs do not repeat for long."""
    config = ModelConfig(family=family, dim=16, heads=2, vocab_size=vocab_size, max_positions=128, **layers)
    network = build(config).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def rows_for(config: ModelConfig, seed: int, count: int = 5, max_length: int = 7) -> list[Row]:
    """Random sources and prompts of random lengths."""
    draw = random.Random(seed)

    def tokens(min_length: int) -> list[int]:
        return [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(min_length, max_length))]

    if config.family == "decoder":
        return [([], tokens(1)) for _ in range(count)]
    return [(tokens(1), [BEGIN, *(tokens(0) if draw.random() < 0.5 else [])]) for _ in range(count)]


def same_outputs(outputs: Any, expected: Any, within: float = 1e-6) -> bool:
    """Return whether outputs have the same ids, and scores and logprobs within a tolerance."""
    for row, expected_row in zip(outputs, expected, strict=True):
        for output, other in zip(row, expected_row, strict=True):
            if (output.ids, output.finished) != (other.ids, other.finished):
                return False
            if other.score is not None and output.score != pytest.approx(other.score, abs=within):
                return False
            if other.logprobs is not None:
                assert output.logprobs == pytest.approx(other.logprobs, abs=within)
    return True
