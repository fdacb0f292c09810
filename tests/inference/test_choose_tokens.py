"""Choosing the tokens of a step: vectorized options equal those of single rows, and those of transformers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig
from clearhead.inference.logits_processors import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from clearhead.inference.sampling import Sampler, SamplingTensors, TokenCounts, choose_tokens, sampling_threshold
from clearhead.inference.step import SamplingInputs
from clearhead.inference.token_buffer import TokenBuffer

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
]
Rows = list[dict[str, Any]]
CPU = torch.device("cpu")


def sampling_inputs(rows: Rows, seeds: list[int], num_new: int = 0, logprobs: int = -1) -> SamplingInputs:
    configs = [GenerationConfig(**row) for row in rows]

    def column(name: str, dtype: Any) -> Any:
        return np.array([getattr(config, name) for config in configs], dtype=dtype)

    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return SamplingInputs(
        numbers=np.arange(len(rows), dtype=np.int32),
        top_k=column("top_k", np.int32),
        seeds=np.array(seeds, dtype=np.int64),
        num_new=np.full(len(rows), num_new, dtype=np.int64),
        logprobs=logprobs,
        **{name: column(name, np.float32) for name in floats},
    )


def tensors(rows: Rows, seeds: list[int], num_new: int = 0, logprobs: int = -1) -> SamplingTensors:
    return SamplingTensors.from_inputs(sampling_inputs(rows, seeds, num_new, logprobs), CPU)


@given(st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=7), st.integers(2, 300), st.integers(0, 1 << 30))
def test_a_row_never_depends_on_the_others_and_equals_the_sampler(
    rows: list[dict[str, Any]], vocab_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    logits, seeds = 3 * torch.randn(len(rows), vocab_size, dtype=torch.float64), list(range(seed, seed + len(rows)))
    tokens = choose_tokens(logits.clone(), tensors(rows, seeds, 3)).tokens
    for number, row in enumerate(rows):
        alone = choose_tokens(logits[number : number + 1].clone(), tensors([row], [seeds[number]], 3)).tokens
        sampler = Sampler.from_config(GenerationConfig(**row))
        expected = sampler(logits[number : number + 1], torch.tensor([seeds[number]]), torch.tensor([3]))
        assert tokens[number] == alone[0] == expected[0]


def test_rows_with_equal_logits_choose_alike_in_any_batch() -> None:
    """bf16 logits have many ties, also at the borders of top-k and top-p."""
    logits = torch.randint(4, (1, 40)).float()
    for row in OPTIONS[1:]:
        alone = [choose_tokens(logits.clone(), tensors([row], [seed])).tokens for seed in range(60)]
        others = [{"temperature": 1.0, "top_k": 30}, {"temperature": 1.0, "top_p": 0.99}]
        for other in others:
            both = [
                choose_tokens(logits.repeat(2, 1), tensors([row, other], [seed, 1])).tokens[:1] for seed in range(60)
            ]
            assert torch.equal(torch.cat(alone), torch.cat(both))


WARPERS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"top_k": 5}, [transformers.TopKLogitsWarper(5)]),
    ({"top_p": 0.8}, [transformers.TopPLogitsWarper(0.8)]),
    ({"min_p": 0.05}, [transformers.MinPLogitsWarper(0.05)]),
    (
        {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
        [transformers.TopKLogitsWarper(9), transformers.TopPLogitsWarper(0.9), transformers.MinPLogitsWarper(0.02)],
    ),
]


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_rows_with_different_options_keep_the_tokens_of_transformers(temperature: float) -> None:
    logits = 3 * torch.randn(200, 50)
    options = [{"temperature": temperature, **WARPERS[row % 4][0]} for row in range(200)]
    scaled = logits / temperature
    threshold = sampling_threshold(scaled, tensors(options, list(range(200))))
    for number, (_, warpers) in enumerate(WARPERS):
        expected = scaled[number::4]
        for warper in warpers:
            expected = warper(None, expected)
        assert torch.equal((scaled < threshold)[number::4], expected.isneginf())
        assert expected.isneginf().any()


def test_penalties_equal_the_logits_processors_row_by_row() -> None:
    prompts, new = [[1, 2, 3], [4, 4], [5]], [[7, 7], [8, 1], [9, 9]]
    rows = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.8},
        {"repetition_penalty": 0.5, "presence_penalty": -0.4},
    ]
    logits, counts = 3 * torch.randn(3, 12), TokenCounts(3, 12, CPU)
    for number in range(3):
        counts.start(number, [11, 10], [6])  # the row number was used before
        counts.start(number, prompts[number], new[number][:1])
        counts.add(torch.tensor([number]), torch.tensor(new[number][1:]))
    expected = []
    for number, row in enumerate(rows):
        buffer = TokenBuffer([prompts[number]], [5], 12, CPU)
        for token in new[number]:
            buffer.append(torch.tensor([token]))
        processed = RepetitionPenalty(row.get("repetition_penalty", 1.0))(logits[number : number + 1], buffer)
        processed = PresencePenalty(row.get("presence_penalty", 0.0))(processed, buffer)
        expected.append(FrequencyPenalty(row.get("frequency_penalty", 0.0))(processed, buffer).argmax())
    choice = choose_tokens(logits.clone(), tensors(rows, [0, 1, 2], logprobs=3), counts)
    assert choice.tokens.tolist() == [int(token) for token in expected]
    raw = logits.log_softmax(dim=-1)
    torch.testing.assert_close(choice.logprobs, raw.gather(1, choice.tokens[:, None])[:, 0])
    assert torch.equal(choice.top_tokens, raw.topk(3).indices)
    again = choose_tokens(torch.zeros(1, 12), tensors([{"presence_penalty": 1.0}], [0]), counts)
    assert int(again.tokens) not in {*new[0], int(choice.tokens[0])}, "the chosen token is counted"


def test_the_frequency_penalty_counts_how_often_a_token_was_generated() -> None:
    counts = TokenCounts(1, 4, CPU)
    counts.start(0, [3, 3, 3, 3], [1, 1, 2])
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.4]])
    choice = choose_tokens(logits, tensors([{"frequency_penalty": 0.9}], [0]), counts)
    assert choice.tokens.tolist() == [3]  # 0, 1.2, 1.1 and, from the prompt only, 1.4


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 700)
    assert choose_tokens(logits, tensors([{}, {"temperature": 1.0}], [0, 1])).tokens[0] == 0
    assert choose_tokens(logits, tensors([{}, {}], [0, 1])).tokens.tolist() == [0, 0]


@pytest.mark.parametrize("options", OPTIONS)
def test_rows_without_a_finite_logit_are_reported(options: dict[str, Any]) -> None:
    logits = torch.randn(4, 9)
    logits[1, 3], logits[2] = math.nan, -math.inf
    logits[3, :8] = -math.inf  # only one token is left
    output = choose_tokens(logits, tensors([options] * 4, list(range(4)))).output()
    assert output.finite == [True, False, False, True]
    assert output.tokens[3] == 8
    assert all(0 <= token < 9 for token in output.tokens)
