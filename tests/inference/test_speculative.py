"""Guessing ahead changes how many steps a text takes, never the text."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.errors import UserError
from clearhead.inference import DraftModel, PromptLookup, Step, stream
from clearhead.inference.generation_batch import GenerationBatch
from tests.inference.random_writers import FEW, rows_for, same, sharpened, writers
from tests.inference.reference import END, search

RULES = st.sampled_from(
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "samples": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram": 3},
        {"temperature": 1.2, "min_new_tokens": 5, "forced": ((5, 6),), "banned": ((7,),)},
    ]
)


def slightly_changed(network: Any, amount: float) -> Any:
    """Another network of the same kind, more or less like this one."""
    other = deepcopy(network)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(amount * torch.randn_like(parameter))
    return other


@FEW
@given(writers, st.integers(0, 99), RULES, st.sampled_from([0.0, 0.05, 1.0]), st.integers(1, 5))
def test_a_draft_model_never_changes_the_text(
    config: ModelConfig, seed: int, rules: dict[str, Any], unlike: float, num_draft_tokens: int
) -> None:
    network, rows = sharpened(config), rows_for(config, seed, count=4)
    settings = GenerationConfig(max_new_tokens=12, logprobs=True, **rules)
    draft = DraftModel(slightly_changed(network, unlike), num_draft_tokens)
    assert same(search(network, rows, settings, draft=draft), search(network, rows, settings))


@FEW
@given(writers, st.integers(0, 99), RULES, st.integers(1, 6), st.integers(1, 4))
def test_looking_up_in_the_prompt_never_changes_the_text(
    config: ModelConfig, seed: int, rules: dict[str, Any], num_draft_tokens: int, max_length: int
) -> None:
    network, rows = sharpened(config), rows_for(config, seed, count=4)
    settings = GenerationConfig(max_new_tokens=12, logprobs=True, **rules)
    assert same(
        search(network, rows, settings, draft=PromptLookup(num_draft_tokens, max_length)),
        search(network, rows, settings),
    )


@FEW
@given(writers, st.integers(0, 99))
def test_a_stream_with_guesses_gives_the_same_text(config: ModelConfig, seed: int) -> None:
    network = sharpened(config)
    [(source, prompt)] = rows_for(config, seed, count=1)
    for temperature in (0.0, 1.0):
        settings = GenerationConfig(max_new_tokens=12, temperature=temperature)
        options = {"end": END, "seed": seed, "source": source or None}
        expected = list(stream(network, prompt, settings, **options))
        for draft in (DraftModel(slightly_changed(network, 0.05)), PromptLookup()):
            assert list(stream(network, prompt, settings, **options, draft=draft)) == expected


def steps_taken(work: Any) -> list[int]:
    """How many tokens each step of any network read."""
    taken = []
    plain = Step.next

    def counted(self: Step, ids: torch.Tensor) -> torch.Tensor:
        taken.append(ids.shape[1])
        return plain(self, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "next", counted)
        work()
    return taken


def gpt(positions: int = 64) -> Any:
    return sharpened(
        ModelConfig(family="decoder", decoder_layers=1, dim=8, heads=2, vocab_size=23, max_positions=positions)
    )


def test_right_guesses_save_steps() -> None:
    network, settings = gpt(), GenerationConfig(max_new_tokens=21, min_new_tokens=21)
    rows = [([], [4, 5]), ([], [6])]
    taken = steps_taken(lambda: search(network, rows, settings, draft=DraftModel(network, 4)))
    # After the first token, 4 guesses are right each time and a fifth comes with them: 4 rounds for 20 tokens.
    assert taken.count(5) == 4
    assert len(steps_taken(lambda: search(network, rows, settings))) == 20


def test_a_repetition_is_looked_up() -> None:
    network = gpt()
    step = Step(network, 3, 40)
    prompts = [[7, 8, 9, 2, 7, 8], [3, 4, 3], [5, 6, 11]]
    rows = GenerationBatch(step, step.start(prompts), prompts, GenerationConfig(), [END], [0, 0, 0])
    rows.take(torch.tensor([9, 4, 12]))
    found = PromptLookup().propose(rows, 6)
    assert found[0].tolist() == [2, 7, 8, 9, 2, 7], "it goes round"
    assert found[1].tolist() == [3, 4, 3, 4, 3, 4]
    assert found.shape == (3, 6)


def test_a_draft_with_too_few_positions_is_refused() -> None:
    with pytest.raises(UserError, match="draft model has 8 positions"):
        search(gpt(), [([], [1, 2])], GenerationConfig(max_new_tokens=20), draft=DraftModel(gpt(positions=8)))
