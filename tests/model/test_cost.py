"""Cost of models: published parameter counts, and FLOPs as torch counts them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clearhead.config import preset, preset_names
from clearhead.model import KVCache, Mask, Pattern, attention_backend, build
from clearhead.model.cost import count_parameters, flops_per_token, model_cost, visible_keys

PUBLISHED = {
    "transformer-base": 63_082_496,
    "transformer-big": 214_245_376,
    "bert-tiny": 4_385_920,
    "bert-mini": 11_170_560,
    "bert-small": 28_763_648,
    "bert-medium": 41_373_184,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "roberta-base": 124_645_632,
    "xlm-r-base": 278_043_648,
    "distilbert": 66_362_880,
    "modernbert-base": 149_014_272,
    "bart-base": 139_420_416,
    "nllb-600m": 615_073_792,
    "marian": 73_944_309,
    "gpt1": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3": 174_604_259_328,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "phi3-mini": 3_821_079_552,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    assert model_cost(preset(name)).parameters == PUBLISHED[name]


def test_every_preset_is_published_or_tiny() -> None:
    assert set(preset_names()) == PUBLISHED.keys() | {"tiny-translator", "tiny-encoder", "tiny-gpt", "tiny-llama"}


@pytest.mark.parametrize("name", ["tiny-translator", "tiny-encoder", "tiny-gpt", "tiny-llama"])
def test_flops_equal_torchs_count(name: str) -> None:
    network, tokens = build(preset(name)).eval(), 16
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, attention_backend("reference"):
        network(*((ids, ids) if name == "tiny-translator" else (ids,)))
    assert flops_per_token(network, tokens) * tokens == counter.get_total_flops()


@pytest.mark.parametrize("pattern", [Pattern(), Pattern("window", 5), Pattern("column", 4), Pattern("block", 4),
                                     Pattern("summary", 4, 2)])  # fmt: skip
def test_visible_keys_equal_the_last_row_of_the_mask(pattern: Pattern) -> None:
    for context in range(1, 20):
        dense = Mask(True, pattern).dense(context, context, torch.device("cpu"))
        assert visible_keys(pattern, context) == int(dense.expand(1, 1, context, context)[0, 0, -1].sum())


def test_cache_bytes_equal_those_of_a_cache() -> None:
    config = preset("tiny-llama")
    cache = KVCache(config, rows=1, capacity=100)
    build(config).bfloat16()(torch.zeros(1, 100, dtype=torch.long), cache=cache)
    expected = sum(layer.keys[:, :, :100].nbytes + layer.values[:, :, :100].nbytes for layer in cache.layers)
    assert model_cost(config, context=100, dtype=torch.bfloat16).cache_bytes == expected
    network = build(config)
    assert model_cost(config).weight_bytes == 4 * count_parameters(network)


def test_the_cache_of_a_translator_includes_its_source_and_context_is_clamped_to_max_positions() -> None:
    cost = model_cost(preset("tiny-translator"), context=10_000, dtype=torch.bfloat16)  # max_positions is 256
    # keys and values, target and source, two layers
    assert cost.cache_bytes == 2 * 2 * 2 * 128 * 256 * torch.bfloat16.itemsize
    assert cost.training_bytes == 16 * cost.parameters


def test_flops_exclude_masked_keys_and_heads_that_run_once_a_row() -> None:
    def flops(*changes: str) -> int:
        return model_cost(preset("tiny-gpt", changes), context=16).flops_per_token

    assert flops() - flops("attention=window", "window=5") == 4 * 128 * 2 * (16 - 5)
    assert flops("outputs=classes", "labels=3") == flops("outputs=[]")
