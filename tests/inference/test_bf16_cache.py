"""Trees in bf16 beside the same trees in fp32, and where they are made."""

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.config import GenerationConfig, preset
from clearhead.inference import bf16_cache as halves
from clearhead.inference import optimize_for_inference, translate
from clearhead.inference.bf16_cache import BLOCK, BF16KVCache, can_use_bf16_cache
from clearhead.inference.step import Step
from clearhead.model import build
from clearhead.model.cache import LayerKVCache

ROWS, BRANCHES, STEPS = 16, 4, 20


@pytest.fixture(autouse=True)
def _any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN does slowly is the same."""
    monkeypatch.setattr(halves, "_has_halves", lambda: True)


def translator(dtype: torch.dtype = torch.int8, *changes: str) -> Any:
    """A small one that says different things of different texts."""
    torch.manual_seed(0)
    network = build(preset("tiny-translator", changes)).eval()
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return optimize_for_inference(network, dtype)


@torch.inference_mode()
def walk(network: Any, sizes: list[int]) -> tuple[list[Tensor], Step]:
    """The scores of each step of a tree that goes on from other branches, and of which every second row leaves."""
    torch.manual_seed(1)
    sources = [torch.randint(4000, (size,)).tolist() for size in sizes]
    prompts = [torch.randint(4000, (1 + size % 2,)).tolist() for size in sizes]
    step = Step(network, ROWS, 2 + STEPS)
    found, rows = [step.start(prompts, sources)], ROWS
    step.branch(BRANCHES, STEPS)
    for number in range(STEPS):
        step.graft(torch.randint(BRANCHES, (rows, BRANCHES)))
        found.append(step.next(torch.randint(4000, (rows, BRANCHES))))
        if number == STEPS // 2:
            step.select(torch.arange(0, ROWS, 2))
            rows = ROWS // 2
    return found, step


@pytest.mark.parametrize("sizes", [[7] * ROWS, [2 + n % 7 for n in range(ROWS)]])
def test_a_tree_in_halves_reads_what_the_whole_one_reads(
    sizes: list[int], between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = translator()
    rounded, step = walk(network, sizes)
    layer = step.cache.layers[0]
    assert isinstance(layer, BF16KVCache)
    assert layer.keys is not None
    assert layer.keys.dtype == torch.bfloat16
    assert 1 + BRANCHES * STEPS <= layer.keys.shape[2] <= 1 + BRANCHES * STEPS + 2 * BLOCK
    monkeypatch.setattr(halves, "_has_halves", lambda: False)
    exact, step = walk(network, sizes)
    assert type(step.cache.layers[0]) is LayerKVCache
    for ours, theirs in zip(rounded, exact, strict=True):
        assert (ours - theirs).square().mean() <= 1e-3 * theirs.var()


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary", "none"])
def test_a_search_of_halves_finds_nearly_the_same_texts(
    position: str, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, config = translator(torch.int8, f"position={position}"), GenerationConfig(beam=3, max_new_tokens=15)
    sources = [torch.randint(4000, (3 + n % 5,)).tolist() for n in range(ROWS)]
    rounded = translate(network, sources, config, begin=1, end=2)
    monkeypatch.setattr(halves, "_has_halves", lambda: False)
    exact = translate(network, sources, config, begin=1, end=2)
    pairs = [(ours[0], theirs[0]) for ours, theirs in zip(rounded, exact, strict=True)]
    # Of random networks, whose words are close to each other, two thirds; one that reads wrongly finds none.
    assert sum(ours.ids == theirs.ids for ours, theirs in pairs) >= 0.65 * ROWS
    assert all(abs(ours.score - theirs.score) < 0.05 * abs(theirs.score) for ours, theirs in pairs)


def test_only_bytes_in_many_heads_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    network = translator()
    assert can_use_bf16_cache(network, ROWS)
    assert not can_use_bf16_cache(network, 1)
    assert not can_use_bf16_cache(translator(torch.float32), ROWS)
    assert not can_use_bf16_cache(optimize_for_inference(build(preset("tiny-gpt")).eval(), torch.int8), ROWS)
    monkeypatch.setattr(halves, "_has_halves", lambda: False)
    assert not can_use_bf16_cache(network, ROWS)
