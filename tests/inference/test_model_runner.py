"""Logits of decode steps never depend on how the KV cache has grown, rewound, joined or dropped rows."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference import ModelRunner
from clearhead.inference import beam_search as beam_module
from clearhead.model import KVCache, TreeCache, build
from clearhead.model import cache as cache_module
from tests.inference.peers import marian, random_rows
from tests.inference.random_models import FEW, generative_configs, random_model, rows_for, same_outputs
from tests.inference.test_parity_transformers import generate_ours
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
            runner.start_beams(2, 3)
            logits += [runner.decode_step(ids[:, :2]) for _ in range(3)]
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


@pytest.mark.parametrize("early", ["full", "likely"])
def test_a_closed_row_that_stays_in_the_batch_gets_no_more_hypotheses(early: str) -> None:
    pair, results = marian(), []
    rows = random_rows(24)
    config = GenerationConfig(max_new_tokens=16, beam=3, n_best=3, early_stopping=early, length_penalty=2.0)
    for threshold in (1.0, 0.0):  # removed at once, at the end
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(beam_module, "COMPACT_THRESHOLD", threshold)
            results.append(generate_ours(pair, rows, config))
    assert same_outputs(*results)


@FEW
@given(generative_configs, st.integers(0, 99), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3))
def test_rows_that_join_and_leave_decode_as_alone(
    config: ModelConfig, seed: int, ahead: int, first: int, second: int
) -> None:
    """Two batches, one `ahead` tokens ahead, are joined; two rows are dropped; the logits are those of single rows."""
    network, rows = random_model(config), rows_for(config, seed, count=6)
    ids = torch.randint(23, (6, ahead + 3))
    order = list(range(6))

    def prefill(indices: list[int]) -> ModelRunner:
        sources = [rows[index][0] for index in indices] if config.family == "encoder-decoder" else None
        runner = ModelRunner(network, len(indices), 20)
        runner.prefill([rows[index][1] for index in indices], sources)
        return runner

    with torch.inference_mode():
        runner, late = prefill([0, 1, 2, 3]), prefill([4, 5])
        for column in range(ahead):
            runner.decode_step(ids[:4, column, None])
        runner.concat(late, 30)
        logits = [runner.decode_step(ids[:, ahead, None])]
        for row in (first, second):
            runner.drop_row(row)
            order[row] = order[-1]
            order.pop()
        runner.rewind([len(rows[index][1]) + 1 + ahead * (index < 4) for index in order])
        logits += [runner.decode_step(ids[order, ahead + column, None]) for column in (1, 2)]
        for row, index in enumerate(order):
            alone = prefill([index])
            for column in range(ahead if index < 4 else 0):
                alone.decode_step(ids[index, None, column, None])
            expected = [alone.decode_step(ids[index, None, ahead + column, None])[0] for column in range(3)]
            joined = [logits[0][index], logits[1][row], logits[2][row]]
            torch.testing.assert_close(torch.stack(joined), torch.stack(expected), atol=1e-9, rtol=0)


def test_beams_take_one_token_each_for_at_most_the_given_steps() -> None:
    config = ModelConfig(family="decoder", decoder_layers=1, dim=8, heads=2, vocab_size=12, max_positions=8)
    network: Any = build(config).eval()
    cache = KVCache(network.config, rows=2, capacity=8)
    with torch.no_grad():
        network(torch.tensor([[1, 2], [3, 4]]), cache=cache)
        tree = TreeCache(cache, branches=3, steps=2)
        with pytest.raises(ValueError, match="one token a branch"):
            network(torch.tensor([[1], [2]]), cache=tree)
        for _ in range(2):
            network(torch.ones(2, 3, dtype=torch.long), cache=tree)
        with pytest.raises(ValueError, match="fewer steps"):
            network(torch.ones(2, 3, dtype=torch.long), cache=tree)
