"""Penalties, banned and forced sequences on small hand-computed rows."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference.logits_processors import build_processors
from clearhead.inference.token_buffer import TokenBuffer
from tests.inference.random_models import FEW, generative_configs, random_model, rows_for
from tests.inference.reference import END, search

VOCAB = 10
INF = math.inf


def buffer_with(prompts: list[list[int]], new: list[list[int]], limit: int = 20) -> TokenBuffer:
    """A buffer of prompts and new tokens, of which all rows have the same number."""
    buffer = TokenBuffer(prompts, [limit] * len(prompts), VOCAB, torch.device("cpu"))
    for column in zip(*new, strict=True):
        buffer.append(torch.tensor(column))
    return buffer


def processed_logits(logits: list[list[float]], buffer: TokenBuffer, **options: Any) -> torch.Tensor:
    """Apply the processors of the given options."""
    processed = torch.tensor(logits)
    for process in build_processors(GenerationConfig(**options), torch.tensor([END])):
        processed = process(processed, buffer)
    return processed


def banned_tokens(logits: torch.Tensor) -> set[int]:
    return {token for token in range(VOCAB) if logits[token] == -INF}


def test_repetition_penalty_applies_to_prompt_and_new_tokens() -> None:
    buffer = buffer_with([[1, 2], [3]], [[4], [5]])
    logits = [[-1.0, 2.0, -3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]] * 2
    processed = processed_logits(logits, buffer, repetition_penalty=2.0)
    assert processed[0].tolist() == [-1.0, 1.0, -6.0, 4.0, 2.5, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert processed[1].tolist() == [-1.0, 2.0, -3.0, 2.0, 5.0, 3.0, 7.0, 8.0, 9.0, 10.0]


def test_frequency_penalty_counts_only_new_tokens() -> None:
    processed = processed_logits([[0.0] * VOCAB], buffer_with([[1, 2]], [[4, 2, 4]]), frequency_penalty=1.5)
    expected = torch.zeros(1, VOCAB)
    expected[0, 2], expected[0, 4] = -1.5, -3.0
    assert torch.equal(processed, expected)


def test_presence_penalty_applies_once_and_only_to_new_tokens() -> None:
    processed = processed_logits([[0.0] * VOCAB], buffer_with([[1, 2]], [[4, 2, 4]]), presence_penalty=1.5)
    assert processed[0].tolist() == [0, 0, -1.5, 0, -1.5, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("size", "banned"),
    [(1, {1, 2, 3}), (2, {2, 3}), (3, {2, 3}), (4, set()), (9, set())],
)
def test_no_ngram_is_repeated(size: int, banned: set[int]) -> None:
    buffer = buffer_with([[3, 1, 2]], [[3, 1, 3, 1]])  # 1 and (3, 1) were followed by 2 and by 3
    processed = processed_logits([[0.0] * VOCAB], buffer, no_repeat_ngram_size=size)[0]
    assert banned_tokens(processed) == banned


def test_ngrams_of_short_rows_do_not_depend_on_longer_rows() -> None:
    buffer = buffer_with([[5], [1, 2, 1, 4]], [[6], [1]])
    processed = processed_logits([[0.0] * VOCAB] * 2, buffer, no_repeat_ngram_size=2)
    assert processed[0].isfinite().all()
    assert banned_tokens(processed[1]) == {2, 4}


def test_the_last_token_of_a_banned_sequence_is_banned() -> None:
    sequences = ((3,), (5, 6), (4, 5, 7), (8, 5, 9))
    processed = processed_logits([[0.0] * VOCAB] * 2, buffer_with([[4], [1]], [[5], [5]]), banned_ids=sequences)
    assert banned_tokens(processed[0]) == {3, 6, 7}
    assert banned_tokens(processed[1]) == {3, 6}


def test_eos_is_banned_before_min_new_tokens() -> None:
    for new in range(4):
        processed = processed_logits([[0.0] * VOCAB], buffer_with([[1]], [[2] * new]), min_new_tokens=2)
        assert (processed[0, END] == -INF) == (new < 2)


def allowed_tokens(buffer: TokenBuffer, best: int, **options: Any) -> set[int]:
    """The tokens that are not banned if `best` has the highest logit."""
    logits = [[float(token == best) for token in range(VOCAB)]]
    return set(range(VOCAB)) - banned_tokens(processed_logits(logits, buffer, **options)[0])


def test_forced_sequences_come_before_eos_once_begun_or_when_room_runs_out() -> None:
    forced = ((5, 6), (7,))
    all_tokens = set(range(VOCAB))
    assert allowed_tokens(buffer_with([[1]], [[2]]), best=3, forced_ids=forced) == all_tokens - {END}
    assert allowed_tokens(buffer_with([[1]], [[2]]), best=END, forced_ids=forced) == {5}
    assert allowed_tokens(buffer_with([[1]], [[2, 5]]), best=3, forced_ids=forced) == {6}
    assert allowed_tokens(buffer_with([[1]], [[5, 6]]), best=END, forced_ids=forced) == {7}
    assert allowed_tokens(buffer_with([[1]], [[5, 6, 7]]), best=END, forced_ids=forced) == all_tokens
    prompt_only = buffer_with([[5, 6, 7]], [[2]])
    assert allowed_tokens(prompt_only, best=END, forced_ids=forced) == {5}, "the prompt does not count"
    assert allowed_tokens(buffer_with([[1]], [[2] * 5], limit=9), best=3, forced_ids=forced) == {5}
    assert allowed_tokens(buffer_with([[1]], [[2] * 4], limit=9), best=3, forced_ids=forced) == all_tokens - {END}


@FEW
@given(
    generative_configs,
    st.integers(0, 99),
    st.lists(st.lists(st.integers(2, 22), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
    st.sampled_from([{}, {"temperature": 1.5}, {"beam": 3}]),
    st.integers(10, 12),
)
def test_every_output_contains_the_forced_sequences(
    config: ModelConfig, seed: int, sequences: tuple[tuple[int, ...], ...], options: dict[str, Any], max_new_tokens: int
) -> None:
    settings = GenerationConfig(max_new_tokens=max_new_tokens, forced_ids=sequences, **options)
    for outputs in search(random_model(config), rows_for(config, seed, count=3), settings):
        text = " ".join(map(str, ["", *outputs[0].ids, ""]))
        for sequence in sequences:
            assert " ".join(map(str, ["", *sequence, ""])) in text
