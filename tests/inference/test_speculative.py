"""Speculative decoding changes the number of steps, never the output."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.errors import UserError
from clearhead.inference import DraftModel, PromptLookup, stream
from clearhead.inference.generation_batch import GenerationBatch
from clearhead.inference.step_batch import StepBatch
from tests.inference.random_models import FEW, generative_configs, random_model, rows_for, same_outputs
from tests.inference.reference import END, search

OPTIONS = st.sampled_from(
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "samples": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"temperature": 1.2, "min_new_tokens": 5, "forced_ids": ((5, 6),), "banned_ids": ((7,),)},
    ]
)


def perturbed_copy(network: Any, amount: float) -> Any:
    """Another network of the same shape, more or less similar to this one."""
    other = deepcopy(network)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(amount * torch.randn_like(parameter))
    return other


@FEW
@given(generative_configs, st.integers(0, 99), OPTIONS, st.sampled_from([0.0, 0.05, 1.0]), st.integers(1, 5))
def test_a_draft_model_never_changes_the_output(
    config: ModelConfig, seed: int, options: dict[str, Any], amount: float, num_draft_tokens: int
) -> None:
    network, rows = random_model(config), rows_for(config, seed, count=4)
    settings = GenerationConfig(max_new_tokens=12, logprobs=True, **options)
    draft = DraftModel(perturbed_copy(network, amount), num_draft_tokens)
    assert same_outputs(search(network, rows, settings, draft=draft), search(network, rows, settings))


@FEW
@given(generative_configs, st.integers(0, 99), OPTIONS, st.integers(1, 6), st.integers(1, 4))
def test_prompt_lookup_never_changes_the_output(
    config: ModelConfig, seed: int, options: dict[str, Any], num_draft_tokens: int, max_length: int
) -> None:
    network, rows = random_model(config), rows_for(config, seed, count=4)
    settings = GenerationConfig(max_new_tokens=12, logprobs=True, **options)
    assert same_outputs(
        search(network, rows, settings, draft=PromptLookup(num_draft_tokens, max_length)),
        search(network, rows, settings),
    )


@FEW
@given(generative_configs, st.integers(0, 99))
def test_a_stream_with_a_draft_equals_one_without(config: ModelConfig, seed: int) -> None:
    network = random_model(config)
    [(source, prompt)] = rows_for(config, seed, count=1)
    for temperature in (0.0, 1.0):
        settings = GenerationConfig(max_new_tokens=12, temperature=temperature)
        expected = list(stream(network, prompt, settings, eos_ids=END, seed=seed, source=source or None))
        for draft in (DraftModel(perturbed_copy(network, 0.05)), PromptLookup()):
            tokens = stream(network, prompt, settings, eos_ids=END, seed=seed, source=source or None, draft=draft)
            assert list(tokens) == expected


def tokens_of_steps(run: Any) -> list[int]:
    """Run and return the number of tokens of each decode step of any network."""
    tokens = []
    original = StepBatch.decode_step

    def counted(self: StepBatch, ids: torch.Tensor) -> torch.Tensor:
        tokens.append(ids.shape[1])
        return original(self, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepBatch, "decode_step", counted)
        run()
    return tokens


def gpt(max_positions: int = 64) -> Any:
    return random_model(
        ModelConfig(family="decoder", decoder_layers=1, dim=8, heads=2, vocab_size=23, max_positions=max_positions)
    )


def test_accepted_draft_tokens_save_steps() -> None:
    network, settings = gpt(), GenerationConfig(max_new_tokens=21, min_new_tokens=21)
    rows = [([], [4, 5]), ([], [6])]
    tokens = tokens_of_steps(lambda: search(network, rows, settings, draft=DraftModel(network, 4)))
    # After the first token, every step accepts 4 draft tokens and adds a fifth: 4 steps for 20 tokens.
    assert tokens.count(5) == 4
    assert len(tokens_of_steps(lambda: search(network, rows, settings))) == 20


def test_prompt_lookup_proposes_what_followed_the_last_match() -> None:
    network = gpt()
    prompts = [[7, 8, 9, 2, 7, 8], [3, 4, 3], [5, 6, 11]]
    runner = StepBatch.of(network, prompts, None, 60)
    batch = GenerationBatch(runner, runner.prefill(), prompts, GenerationConfig(), [END], [0, 0, 0])
    batch.accept(torch.tensor([9, 4, 12]))
    draft = PromptLookup().propose(batch, 6)
    assert draft[0].tolist() == [2, 7, 8, 9, 2, 7], "wraps around"
    assert draft[1].tolist() == [3, 4, 3, 4, 3, 4]
    assert draft.shape == (3, 6)


def test_a_draft_model_with_too_few_positions_is_refused() -> None:
    with pytest.raises(UserError, match="draft model has 8 positions"):
        search(gpt(), [([], [1, 2])], GenerationConfig(max_new_tokens=20), draft=DraftModel(gpt(max_positions=8)))
