"""Penalties, bans and forced words, on rows small enough to work out by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference.logits_processors import processors
from clearhead.inference.token_buffer import TokenBuffer
from tests.inference.random_writers import FEW, rows_for, sharpened, writers
from tests.inference.reference import END, search

WORDS = 10
INF = math.inf


def after(prompts: list[list[int]], new: list[list[int]], limit: int = 20) -> TokenBuffer:
    """Rows that have grown by as many tokens each."""
    written = TokenBuffer(prompts, [limit] * len(prompts), WORDS, torch.device("cpu"))
    for column in zip(*new, strict=True):
        written.append(torch.tensor(column))
    return written


def processed_logits(scores: list[list[float]], written: TokenBuffer, **rules: Any) -> torch.Tensor:
    """What is left of the scores."""
    found = torch.tensor(scores)
    for process in processors(GenerationConfig(**rules), torch.tensor([END])):
        found = process(found, written)
    return found


def test_repeated_words_are_penalized_wherever_they_stand() -> None:
    written = after([[1, 2], [3]], [[4], [5]])
    scores = [[-1.0, 2.0, -3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]] * 2
    found = processed_logits(scores, written, repetition_penalty=2.0)
    assert found[0].tolist() == [-1.0, 1.0, -6.0, 4.0, 2.5, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert found[1].tolist() == [-1.0, 2.0, -3.0, 2.0, 5.0, 3.0, 7.0, 8.0, 9.0, 10.0]


def test_presence_is_penalized_in_new_words_alone_and_once() -> None:
    found = processed_logits([[0.0] * WORDS], after([[1, 2]], [[4, 2, 4]]), presence_penalty=1.5)
    assert found[0].tolist() == [0, 0, -1.5, 0, -1.5, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("size", "barred"),
    [(1, {1, 2, 3}), (2, {2, 3}), (3, {2, 3}), (4, set()), (9, set())],
)
def test_no_ngram_comes_twice(size: int, barred: set[int]) -> None:
    written = after([[3, 1, 2]], [[3, 1, 3, 1]])  # 1, and 3 1, were followed by 2 and by 3
    found = processed_logits([[0.0] * WORDS], written, no_repeat_ngram=size)[0]
    assert {word for word in range(WORDS) if found[word] == -INF} == barred


def test_short_rows_beside_long_ones_have_their_own_ngrams() -> None:
    found = processed_logits([[0.0] * WORDS] * 2, after([[5], [1, 2, 1, 4]], [[6], [1]]), no_repeat_ngram=2)
    assert found[0].isfinite().all()
    assert {word for word in range(WORDS) if found[1, word] == -INF} == {2, 4}


def test_banned_words_end_before_their_last_token() -> None:
    banned = ((3,), (5, 6), (4, 5, 7), (8, 5, 9))
    found = processed_logits([[0.0] * WORDS] * 2, after([[4], [1]], [[5], [5]]), banned=banned)
    assert {word for word in range(WORDS) if found[0, word] == -INF} == {3, 6, 7}
    assert {word for word in range(WORDS) if found[1, word] == -INF} == {3, 6}


def test_no_end_before_the_minimum() -> None:
    for new in range(4):
        found = processed_logits([[0.0] * WORDS], after([[1]], [[2] * new]), min_new_tokens=2)
        assert (found[0, END] == -INF) == (new < 2)


def allowed(written: TokenBuffer, best: int, **rules: Any) -> set[int]:
    """The words that may come when the model would say `best`."""
    scores = [[float(word == best) for word in range(WORDS)]]
    found = processed_logits(scores, written, **rules)[0]
    return {word for word in range(WORDS) if found[word] > -INF}


def test_forced_words_come_at_the_end_or_when_begun_or_when_room_runs_out() -> None:
    forced = ((5, 6), (7,))
    everything = set(range(WORDS))
    assert allowed(after([[1]], [[2]]), best=3, forced=forced) == everything - {END}
    assert allowed(after([[1]], [[2]]), best=END, forced=forced) == {5}
    assert allowed(after([[1]], [[2, 5]]), best=3, forced=forced) == {6}
    assert allowed(after([[1]], [[5, 6]]), best=END, forced=forced) == {7}
    assert allowed(after([[1]], [[5, 6, 7]]), best=END, forced=forced) == everything
    assert allowed(after([[5, 6, 7]], [[2]]), best=END, forced=forced) == {5}, "the prompt does not count"
    assert allowed(after([[1]], [[2] * 5], limit=9), best=3, forced=forced) == {5}
    assert allowed(after([[1]], [[2] * 4], limit=9), best=3, forced=forced) == everything - {END}


@FEW
@given(
    writers,
    st.integers(0, 99),
    st.lists(st.lists(st.integers(2, 22), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
    st.sampled_from([{}, {"temperature": 1.5}, {"beam": 3}]),
    st.integers(10, 12),
)
def test_forced_words_always_come(
    config: ModelConfig, seed: int, words: tuple[tuple[int, ...], ...], how: dict[str, Any], limit: int
) -> None:
    settings = GenerationConfig(max_new_tokens=limit, forced_ids=words, **how)
    for outputs in search(sharpened(config), rows_for(config, seed, count=3), settings):
        text = " ".join(map(str, ["", *outputs[0].ids, ""]))
        for word in words:
            assert " ".join(map(str, ["", *word, ""])) in text
