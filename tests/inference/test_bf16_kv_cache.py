"""Beam search with a bf16 KV cache is close to fp32, and used only where it is faster."""

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.config import GenerationConfig, preset
from clearhead.inference import bf16_kv_cache, optimize_for_inference, translate
from clearhead.inference.bf16_kv_cache import SLOT_BLOCK, BF16KVCache, can_use_bf16_cache
from clearhead.inference.model_runner import ModelRunner
from clearhead.model import build
from clearhead.model.cache import LayerKVCache

ROWS, BEAMS, STEPS = 16, 4, 20


@pytest.fixture(autouse=True)
def _any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use bf16 on every CPU: without bf16 instructions oneDNN is slow, but the results are the same."""
    monkeypatch.setattr(bf16_kv_cache, "_has_bf16", lambda: True)


def translator(dtype: torch.dtype = torch.int8, *overrides: str) -> Any:
    """A small translator whose outputs depend on the source."""
    torch.manual_seed(0)
    network = build(preset("tiny-translator", overrides)).eval()
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return optimize_for_inference(network, dtype)


@torch.inference_mode()
def beam_logits(network: Any, lengths: list[int]) -> tuple[list[Tensor], ModelRunner]:
    """The logits of each step of random beams, of which every second row is dropped half-way."""
    torch.manual_seed(1)
    sources = [torch.randint(4000, (length,)).tolist() for length in lengths]
    prompts = [torch.randint(4000, (1 + length % 2,)).tolist() for length in lengths]
    runner = ModelRunner(network, ROWS, 2 + STEPS)
    logits, rows = [runner.prefill(prompts, sources)], ROWS
    runner.start_beams(BEAMS, STEPS)
    for number in range(STEPS):
        runner.reorder_beams(torch.randint(BEAMS, (rows, BEAMS)))
        logits.append(runner.decode_step(torch.randint(4000, (rows, BEAMS))))
        if number == STEPS // 2:
            runner.select(torch.arange(0, ROWS, 2))
            rows = ROWS // 2
    return logits, runner


@pytest.mark.parametrize("lengths", [[7] * ROWS, [2 + n % 7 for n in range(ROWS)]])
def test_logits_with_a_bf16_cache_are_close_to_fp32(
    lengths: list[int], between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = translator()
    bf16, runner = beam_logits(network, lengths)
    layer = runner.cache.layers[0]
    assert isinstance(layer, BF16KVCache)
    assert layer.keys is not None
    assert layer.keys.dtype == torch.bfloat16
    assert 1 + BEAMS * STEPS <= layer.keys.shape[2] <= 1 + BEAMS * STEPS + 2 * SLOT_BLOCK
    monkeypatch.setattr(bf16_kv_cache, "_has_bf16", lambda: False)
    fp32, runner = beam_logits(network, lengths)
    assert type(runner.cache.layers[0]) is LayerKVCache
    for rounded, exact in zip(bf16, fp32, strict=True):
        assert (rounded - exact).square().mean() <= 1e-3 * exact.var()


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary", "none"])
def test_beam_search_with_a_bf16_cache_gives_nearly_the_same_texts(
    position: str, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, config = translator(torch.int8, f"position={position}"), GenerationConfig(beam=3, max_new_tokens=15)
    sources = [torch.randint(4000, (3 + n % 5,)).tolist() for n in range(ROWS)]
    bf16 = translate(network, sources, config, bos_id=1, eos_ids=2)
    monkeypatch.setattr(bf16_kv_cache, "_has_bf16", lambda: False)
    fp32 = translate(network, sources, config, bos_id=1, eos_ids=2)
    pairs = [(rounded[0], exact[0]) for rounded, exact in zip(bf16, fp32, strict=True)]
    # The logits of random networks are close to each other, so only two thirds agree; a wrong cache gives none.
    assert sum(rounded.ids == exact.ids for rounded, exact in pairs) >= 0.65 * ROWS
    assert all(abs(rounded.score - exact.score) < 0.05 * abs(exact.score) for rounded, exact in pairs)


def test_bf16_is_used_only_with_int8_weights_and_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    network = translator()
    assert can_use_bf16_cache(network, ROWS)
    assert not can_use_bf16_cache(network, 1)
    assert not can_use_bf16_cache(translator(torch.float32), ROWS)
    assert not can_use_bf16_cache(optimize_for_inference(build(preset("tiny-gpt")).eval(), torch.int8), ROWS)
    monkeypatch.setattr(bf16_kv_cache, "_has_bf16", lambda: False)
    assert not can_use_bf16_cache(network, ROWS)
