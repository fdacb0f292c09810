"""Scheduling: shared prefixes, chunks of prompts, preemption, and errors that concern one request only."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.config import EngineConfig, GenerationConfig
from clearhead.inference import Engine, EngineRequest, generate, translate
from clearhead.inference.reference_step import ReferenceRunner
from clearhead.inference.step import PAGE_SIZE, EncodeInputs, SamplingInputs, StepInputs
from tests.inference.random_models import random_network
from tests.inference.reference import BEGIN
from tests.inference.test_engine import engine_for, small_network

MODES = pytest.mark.parametrize("asynchronous", [False, True])


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()
    engine.step()
    assert engine.stats.pages_used == 0


def expected_ids(network: Any, prompt: Sequence[int], config: GenerationConfig, seed: int = 0) -> list[int]:
    return generate(network, [prompt], config, eos_ids=(), seeds=[seed])[0][0].ids


@MODES
def test_a_common_prompt_is_computed_once(asynchronous: bool) -> None:
    network, draw = small_network("decoder"), random.Random(1)
    common, config = [draw.randrange(1, 24) for _ in range(5 * PAGE_SIZE)], GenerationConfig(max_new_tokens=6)
    prompts = [[*common, *(draw.randrange(1, 24) for _ in range(draw.randint(1, 20)))] for _ in range(9)]
    limits = EngineConfig(max_batch_size=16, cache_tokens=1024, prefill_tokens=32)
    engine = engine_for(network, limits, asynchronous, eos_ids=())
    requests = [engine.submit(prompt, config) for prompt in prompts]  # all at once: the others wait for the first
    finish(engine)
    assert engine.stats.prompt_tokens == len(common) + sum(len(prompt) - len(common) for prompt in prompts)
    assert engine.stats.cached_prompt_tokens == 8 * len(common)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.ids == expected_ids(network, prompt, config)
    answer = [*prompts[0], *requests[0].ids]  # the next turn of a conversation shares the answer, too
    before = engine.stats.cached_prompt_tokens
    engine.submit([*answer, 3], config)
    finish(engine)
    assert engine.stats.cached_prompt_tokens - before == (len(answer) - 1) // PAGE_SIZE * PAGE_SIZE


def test_samples_share_the_pages_of_their_prompt() -> None:
    network = small_network("decoder")
    prompt, config = [1 + i % 20 for i in range(40)], GenerationConfig(max_new_tokens=5, temperature=1.0)
    engine = engine_for(network, EngineConfig(max_batch_size=8, cache_tokens=256), eos_ids=())
    requests = [engine.submit(prompt, config, seed=seed) for seed in range(6)]
    engine.step()
    engine.step()
    assert engine.stats.pages_used == 2 + 6
    finish(engine)
    assert [request.ids for request in requests] == [expected_ids(network, prompt, config, seed) for seed in range(6)]


def test_a_source_is_encoded_once_for_all_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    network, encoded = small_network("encoder-decoder"), list[int]()
    encode = ReferenceRunner.encode

    def count(runner: ReferenceRunner, inputs: EncodeInputs) -> None:
        encoded.append(len(inputs.ids))
        encode(runner, inputs)

    monkeypatch.setattr(ReferenceRunner, "encode", count)
    config, engine = GenerationConfig(max_new_tokens=9, temperature=1.0), Engine(network, eos_ids=())
    sources = [[3] * 20, [3] * 20, [3] * 21, [3] * 20]
    prompts = [[BEGIN], [BEGIN, 4], [BEGIN], [BEGIN]]
    requests = [
        engine.submit(prompt, config, source=source, seed=9) for prompt, source in zip(prompts, sources, strict=True)
    ]
    finish(engine)
    assert encoded == [2]
    for prompt, source, request in zip(prompts, sources, requests, strict=True):
        [[alone]] = translate(network, [source], config, bos_id=BEGIN, eos_ids=(), prefixes=[prompt[1:]], seeds=[9])
        assert request.ids == alone.ids


@MODES
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.4, "frequency_penalty": 0.2}])
def test_preempted_requests_continue_with_the_same_text(asynchronous: bool, options: dict[str, Any]) -> None:
    network = small_network("decoder")
    config = GenerationConfig(max_new_tokens=60, logprobs=True, **options)
    engine = engine_for(network, EngineConfig(max_batch_size=8, cache_tokens=128), asynchronous, eos_ids=())
    requests = [engine.submit([number + 1] * 3, config, seed=number) for number in range(6)]
    order = list[EngineRequest]()
    while engine.busy:
        order += [request for request in engine.step() if request.done]
    assert engine.stats.preemptions >= 2
    assert order == requests, "first come, first served"
    for number, request in enumerate(requests):
        alone = generate(network, [[number + 1] * 3], config, eos_ids=(), seeds=[number])[0][0]
        assert request.ids == alone.ids
        assert request.logprobs == pytest.approx(alone.logprobs, abs=1e-6)


@MODES
def test_a_long_prompt_delays_running_rows_by_one_chunk_a_step(asynchronous: bool) -> None:
    network = random_network("decoder", 24, decoder_layers=1)
    engine = engine_for(network, EngineConfig(max_batch_size=40, prefill_tokens=20), asynchronous, eos_ids=())
    running = [engine.submit([row + 1], GenerationConfig(max_new_tokens=40)) for row in range(20)]
    while not all(request.ids for request in running):
        engine.step()
    long = engine.submit([5] * 110, GenerationConfig(max_new_tokens=3))
    late = engine.submit([6], GenerationConfig(max_new_tokens=3))
    steps = 0
    while not long.ids:
        before, done = engine.stats.prompt_tokens, [len(request.ids) for request in running]
        engine.step()
        assert engine.stats.prompt_tokens - before <= 20
        assert [len(request.ids) for request in running] == [count + 1 for count in done]
        steps += 1
    assert steps == 6 + asynchronous
    assert len(late.ids) <= 1, "first come, first served"
    finish(engine)
    assert long.ids == expected_ids(network, [5] * 110, GenerationConfig(max_new_tokens=3))


class FailingRunner(ReferenceRunner):
    """Runs out of memory where a step has more than `max_rows_of_step` rows, or one with a row of `too_long` tokens."""

    max_rows_of_step, too_long, nan_id = 99, 1 << 30, -2

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        if len(inputs.numbers) > self.max_rows_of_step or inputs.positions.max() >= self.too_long:
            raise MemoryError
        logits = super().logits(inputs)
        logits[torch.from_numpy(inputs.ids[inputs.outputs]) == self.nan_id] = torch.nan
        return logits

    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Any:
        return super().launch(inputs, sampling)


class AsynchronousFailingRunner(FailingRunner):
    asynchronous = True


def failing_engine(asynchronous: bool, **limits: Any) -> Engine:
    network = small_network("decoder")
    engine = engine_for(network, EngineConfig(**limits), eos_ids=())
    kind = AsynchronousFailingRunner if asynchronous else FailingRunner
    engine.runner = kind(network, engine.runner.cache, engine.runner.max_rows)
    return engine


@MODES
def test_out_of_memory_in_a_step_fails_only_the_row_that_does_not_fit_alone(asynchronous: bool) -> None:
    engine, config = failing_engine(asynchronous), GenerationConfig(max_new_tokens=12)
    prompts = [[1, 2, 3], [4] * 9, [5], [6] * 40, [7, 8]]
    requests = [engine.submit(prompt, config) for prompt in prompts]
    engine.step()
    engine.runner.max_rows_of_step, engine.runner.too_long = 2, 20  # type: ignore[attr-defined]
    seen = list[EngineRequest]()
    while engine.busy:
        seen += engine.step()
    engine.step()
    for prompt, request in zip(prompts, requests, strict=True):
        alone = expected_ids(small_network("decoder"), prompt, config)
        assert request.ids == alone[: len(request.ids)]
        assert seen.count(request) >= 1
        if max(len(prompt), len(prompt) + 11) <= 20:
            assert request.output is not None
        else:
            assert "out of memory: shorten the request" in str(request.error)
    assert sum(request.error is not None for request in requests) == 1
    assert engine.stats.pages_used == 0


@MODES
def test_nan_logits_fail_their_row_and_its_pages_are_not_shared(asynchronous: bool) -> None:
    engine, config = failing_engine(asynchronous), GenerationConfig(max_new_tokens=12)
    engine.runner.nan_id = 23  # type: ignore[attr-defined]
    prompts = [[1, 2, 3], [9] * 32 + [23], [4, 5]]
    requests = [engine.submit(prompt, config) for prompt in prompts]
    finish(engine)
    assert "the logits are NaN" in str(requests[1].error)
    assert requests[1].output is None
    for prompt, request in zip(prompts, requests, strict=True):
        if request is not requests[1] and 23 not in request.ids:
            assert request.ids == expected_ids(small_network("decoder"), prompt, config)
    engine.submit([9] * 32 + [22], config)
    finish(engine)
    assert engine.stats.cached_prompt_tokens == 0


@MODES
def test_cancel_in_the_middle_of_a_prompt(asynchronous: bool) -> None:
    network = small_network("decoder")
    engine = engine_for(network, EngineConfig(prefill_tokens=10), asynchronous, eos_ids=())
    other = engine.submit([2], GenerationConfig(max_new_tokens=30))
    long = engine.submit([5] * 60, GenerationConfig())
    for _ in range(3):
        engine.step()
    assert not long.ids
    engine.cancel(long)
    assert engine.stats.pages_used == 1
    again = engine.submit([5] * 60, GenerationConfig(max_new_tokens=3))
    finish(engine)
    assert other.ids == expected_ids(network, [2], GenerationConfig(max_new_tokens=30))
    assert again.ids == expected_ids(network, [5] * 60, GenerationConfig(max_new_tokens=3))


class OnlyEven:
    """A constraint: even tokens, no token twice in a row; fails after `fails_at` tokens."""

    def __init__(self, fails_at: int = 1 << 30):
        self.fails_at = fails_at

    def allowed(self, new_ids: Sequence[int]) -> Any:
        if len(new_ids) == self.fails_at:
            raise ValueError("no such rule")
        mask = np.arange(24) % 2 == 0
        if new_ids:
            mask[new_ids[-1]] = False
        return mask


@MODES
def test_constraints_mask_the_logits_of_their_row_only(asynchronous: bool) -> None:
    network, config = small_network("decoder"), GenerationConfig(max_new_tokens=9, temperature=1.0)
    engine = engine_for(network, EngineConfig(), asynchronous, eos_ids=())
    free, even = engine.submit([1], config), engine.submit([1], config, constraint=OnlyEven())
    broken = engine.submit([2], config, constraint=OnlyEven(fails_at=4))
    finish(engine)
    assert free.ids == expected_ids(network, [1], config)
    assert len(even.ids) == 9
    assert all(token % 2 == 0 for token in even.ids)
    assert all(a != b for a, b in zip(even.ids, even.ids[1:], strict=False))
    assert (len(broken.ids), str(broken.error)) == (4, "no such rule")


def test_the_most_likely_tokens_come_with_their_logprobs() -> None:
    network = small_network("decoder")
    engine = engine_for(network, EngineConfig(), eos_ids=())
    three = engine.submit([1, 2], GenerationConfig(max_new_tokens=4, top_logprobs=3))
    one = engine.submit([1, 2], GenerationConfig(max_new_tokens=4, top_logprobs=1, logprobs=True, banned_ids=((5,),)))
    engine.submit([1, 2], GenerationConfig(max_new_tokens=4))
    finish(engine)
    with torch.no_grad():
        logprobs = network(torch.tensor([[1, 2, *three.ids]]))[0, 1:5].log_softmax(dim=-1)
    for position, top in enumerate(three.top_logprobs):
        best = logprobs[position].topk(3)
        assert [token for token, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert [len(top) for top in one.top_logprobs] == [1] * 4
    assert one.output is not None
    assert len(one.output.logprobs or ()) == 4
