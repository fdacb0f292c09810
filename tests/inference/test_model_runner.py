"""Logits of decode steps never depend on how the KV cache has grown or was rewound."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import ModelConfig
from clearhead.inference import ModelRunner
from clearhead.model import KVCache
from clearhead.model import cache as cache_module
from tests.inference.random_models import FEW, generative_configs, random_model, rows_for
from tests.strategies import configs


@FEW
@given(generative_configs, st.integers(0, 99), st.lists(st.integers(1, 4), min_size=3, max_size=6))
def test_a_growing_cache_equals_a_large_one(config: ModelConfig, seed: int, sizes: list[int]) -> None:
    network, rows, results = random_model(config), rows_for(config, seed, count=3), []
    sources = [source for source, _ in rows] if config.family == "encoder-decoder" else None
    ids = torch.randint(23, (3, sum(sizes)))
    for first_slots in (1, 64):
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(cache_module, "FIRST_SLOTS", first_slots)
            runner = ModelRunner(network, 3, 60)
            logits = [runner.prefill([prompt for _, prompt in rows], sources)[:, None]]
            logits += [runner.decode_step(piece) for piece in ids.split(sizes, dim=1)]
            results.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(*results, atol=1e-9, rtol=0)


@FEW
@given(configs(families=("decoder",)))
def test_padding_never_changes_a_growing_cache(config: ModelConfig) -> None:
    network, ids, results = random_model(config), torch.randint(23, (2, 9)), []
    for first_slots in (1, 64):
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(cache_module, "FIRST_SLOTS", first_slots)
            cache = KVCache(config, rows=2, capacity=30)
            network(ids[:, :3], cache=cache)
            network(ids[:, 3:8], torch.tensor([5, 1]), cache=cache)
            results.append(network(ids[:, 8:], cache=cache))
    torch.testing.assert_close(*results, atol=1e-9, rtol=0)


@FEW
@given(generative_configs, st.integers(0, 99), st.tuples(*[st.integers(0, 5)] * 3))
def test_rewound_tokens_never_change_later_logits(config: ModelConfig, seed: int, keep: tuple[int, ...]) -> None:
    network, rows = random_model(config), rows_for(config, seed, count=3)
    prompts, sources = [prompt for _, prompt in rows], [source for source, _ in rows]
    right, wrong = torch.randint(23, (2, 3, 5))
    with torch.inference_mode():
        runner = ModelRunner(network, 3, 60)
        runner.prefill(prompts, sources)
        runner.decode_step(torch.where(torch.arange(5) < torch.tensor(keep)[:, None], right, wrong))
        runner.rewind([len(prompt) + kept for prompt, kept in zip(prompts, keep, strict=True)])
        logits = runner.decode_step(right[:, :1])
        for row, kept in enumerate(keep):
            alone = ModelRunner(network, 1, 60)
            alone.prefill([[*prompts[row], *right[row, :kept].tolist()]], sources[row : row + 1])
            torch.testing.assert_close(logits[row], alone.decode_step(right[row : row + 1, :1])[0], atol=1e-9, rtol=0)
