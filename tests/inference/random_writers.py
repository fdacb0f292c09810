"""Random models of both families that write, rows for them, and what it means that two searches found the same."""

import random
from typing import Any

import pytest
import torch
from hypothesis import settings

from clearhead.config import ModelConfig
from tests.inference.reference import BEGIN, Row
from tests.strategies import VOCABULARY, configs, network_of

FEW = settings(max_examples=max(1, settings().max_examples // 4))  # a search is many passes of a network
writers = configs(families=("encoder-decoder", "decoder"))


def sharpened(config: ModelConfig) -> Any:
    """A random network whose scores spread by 2, in which the end is neither rare nor certain."""
    network = network_of(config)
    words = network.heads.lm_head.proj
    with torch.no_grad():
        ids = torch.randint(VOCABULARY, (8, 6))
        out = network(ids, ids) if config.family == "encoder-decoder" else network(ids)
        words.weight.mul_(2 / out.std(dim=-1).mean().clamp(min=1e-3))
    return network


def rows_for(config: ModelConfig, seed: int, count: int = 5, max_length: int = 7) -> list[Row]:
    """Random rows of random lengths: source and prompt."""
    draw = random.Random(seed)

    def words(least: int) -> list[int]:
        return [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(least, max_length))]

    if config.family == "decoder":
        return [([], words(1)) for _ in range(count)]
    return [(words(1), [BEGIN, *(words(0) if draw.random() < 0.5 else [])]) for _ in range(count)]


def same(found: Any, expected: Any, within: float = 1e-6) -> bool:
    """The same texts with the same scores, but for the last digits."""
    for outputs, others in zip(found, expected, strict=True):
        for output, other in zip(outputs, others, strict=True):
            if (output.ids, output.finished) != (other.ids, other.finished):
                return False
            if other.score is not None and output.score != pytest.approx(other.score, abs=within):
                return False
            if other.logprobs is not None:
                assert output.logprobs == pytest.approx(other.logprobs, abs=within)
    return True
