"""The engine: requests that join, leave or are cancelled never change the others' outputs, and no memory leaks."""

import gc
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import EngineConfig, GenerationConfig, ModelConfig
from clearhead.errors import ConfigError, UserError
from clearhead.inference import (
    Engine,
    EngineRequest,
    EngineThread,
    GenerationOutput,
    QueueFull,
    run_in_order,
    stream_text,
)
from clearhead.inference.page_pool import pages_for
from clearhead.inference.reference_step import ReferenceRunner
from clearhead.inference.step import PagedKVCache
from clearhead.text import Tokenizer, train
from tests.inference.random_models import (
    FEW,
    TEXTS,
    generative_configs,
    random_model,
    random_network,
    rows_for,
    same_outputs,
)
from tests.inference.reference import END, Row, search

REQUESTS = int(os.environ.get("CLEARHEAD_REQUESTS", "0"))  # set by `make torture`: this many different requests


class RequestSpec(NamedTuple):
    """Source and prompt, options and seed of a request."""

    row: Row
    config: GenerationConfig
    seed: int

    def submit(self, engine: Engine) -> EngineRequest:
        source, prompt = self.row
        return engine.submit(prompt, self.config, seed=self.seed, source=source or None)

    def run_alone(self, network: Any) -> GenerationOutput:
        [[output]] = search(network, [self.row], self.config, seeds=[self.seed])
        return output


def random_options(draw: random.Random, max_length: int) -> GenerationConfig:
    """Random options, of which several requests often share the sampling part."""
    options: dict[str, Any] = {"max_new_tokens": draw.randint(1, max_length), "logprobs": draw.random() < 0.3}
    options["min_new_tokens"] = draw.choice([0, min(3, options["max_new_tokens"])])
    if draw.random() < 0.5:
        options |= {
            "temperature": draw.choice([0.7, 1.3]),
            "top_k": draw.choice([0, 5]),
            "top_p": draw.choice([1.0, 0.9]),
        }
    if draw.random() < 0.2:
        options |= {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    if draw.random() < 0.1:
        options |= {"forced_ids": ((3, 4),), "banned_ids": ((5,), (6, 7))}
        options |= {"max_new_tokens": max_length, "presence_penalty": 0.5}
    return GenerationConfig(**options)


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def process_memory() -> int:
    """Resident bytes of this process; 0 where the system does not report them."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def small_network(family: str) -> Any:
    layers = {"decoder_layers": 1} | ({"encoder_layers": 1} if family == "encoder-decoder" else {})
    torch.manual_seed(5)
    return random_network(family, 24, **layers)


def random_requests(family: str, count: int, draw: random.Random, max_length: int = 12) -> list[RequestSpec]:
    config = small_network(family).config
    return [
        RequestSpec(
            rows_for(config, draw.randrange(1 << 30), count=1, max_length=10)[0],
            random_options(draw, max_length),
            draw.randrange(99),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_thousands_of_requests_at_random_times_with_a_fifth_cancelled(family: str) -> None:
    """The same few hundred requests in changing batches; with `make torture`, 10,000 that are all different."""
    draw, network = random.Random(family), small_network(family)
    specs = random_requests(family, REQUESTS or 300, draw)
    expected = [spec.run_alone(network) for spec in specs]
    total, sent, cancelled = REQUESTS or 3_000, 0, dict.fromkeys(["waiting", "first", "last", "between"], 0)
    limits = EngineConfig(max_batch_size=48, cache_tokens=1200, prefill_tokens=256, max_queue=64)
    engine = engine_for(network, limits, asynchronous=family == "decoder")
    in_flight: dict[
        EngineRequest, tuple[int, int | None]
    ] = {}  # index of the spec, and after how many tokens to cancel
    tensors_before = num_tensors()
    memory_after_a_tenth = 0
    while sent < total or engine.busy:
        for _ in range(min(total - sent, draw.choice([0, 0, 1, 3, 9, 40]), 64 - len(engine.waiting))):
            index = sent % len(specs)
            in_flight[specs[index].submit(engine)] = index, cancel_after(draw, expected[index])
            sent += 1
            memory_after_a_tenth = process_memory() if sent == total // 10 else memory_after_a_tenth
        for request, (_, tokens) in in_flight.items():
            if tokens == len(request.ids) and not request.done:
                rows, is_running = len(engine.running), request in engine.running
                engine.cancel(request)
                assert len(engine.running) == rows - is_running, "the row is free at once"
        engine.step()
        assert engine.stats.pages_used <= sum(map(max_pages, engine.running))
        for request in [request for request in in_flight if request.done]:
            index, tokens = in_flight.pop(request)
            alone = expected[index]
            assert request.ids == alone.ids[: len(request.ids)]
            if not request.cancelled:
                assert same_outputs([[request.output]], [[alone]])
                continue
            assert request.output is None
            last = len(alone.ids) - (not alone.finished)
            cancelled[{0: "waiting", last: "last", 1: "first"}.get(len(request.ids), "between")] += 1
    assert not in_flight
    assert 0.18 < sum(cancelled.values()) / total < 0.22, cancelled
    assert min(cancelled.values()) > total / 100, cancelled
    engine.step()  # of an asynchronous runner, reads the last one
    assert engine.stats.pages_used == 0
    assert num_tensors() == tensors_before
    assert process_memory() - memory_after_a_tenth < 16 << 20


def cancel_after(draw: random.Random, output: GenerationOutput) -> int | None:
    """After how many tokens to cancel a request (0 while it waits), or None not to."""
    last = len(output.ids) - (not output.finished)  # tokens before the last step
    if draw.random() > 0.2:
        return None
    return draw.choice([0, min(1, last), last, draw.randint(0, last)])


def max_pages(request: EngineRequest) -> int:
    """The most pages that a request may use now."""
    return pages_for(len(request.prompt) + len(request.ids) + 1) + pages_for(len(request.source or ()))


class AsynchronousRunner(ReferenceRunner):
    """Chosen tokens are on the host after the next step was launched, as on a GPU."""

    asynchronous = True


def engine_for(network: Any, config: EngineConfig, asynchronous: bool = False, **options: Any) -> Engine:
    dtype, pages = next(network.parameters()).dtype, pages_for(config.cache_tokens) + 1
    cache = PagedKVCache(network.config, pages, dtype, torch.device("cpu"))
    runner = (AsynchronousRunner if asynchronous else ReferenceRunner)(network, cache, config.max_batch_size)
    return Engine(network, config=config, runner=runner, **({"eos_ids": END} | options))


@FEW
@given(
    generative_configs,
    st.integers(0, 2**16),
    st.integers(1, 9),
    st.integers(40, 200),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_request_never_depends_on_its_batch_mates(
    config: ModelConfig, seed: int, rows: int, cache_tokens: int, prefill_tokens: int, asynchronous: bool
) -> None:
    draw, network = random.Random(seed), random_model(config)
    specs = [
        RequestSpec(row, random_options(draw, 9), number) for number, row in enumerate(rows_for(config, seed, count=12))
    ]
    limits = EngineConfig(max_batch_size=rows, cache_tokens=cache_tokens, prefill_tokens=prefill_tokens)
    engine, requests, left = engine_for(network, limits, asynchronous), [], list(specs)
    while left or engine.busy:
        for _ in range(min(len(left), draw.randint(0, 3))):
            requests.append(left.pop(0).submit(engine))
        before = engine.stats.prompt_tokens
        engine.step()
        assert engine.stats.prompt_tokens - before <= prefill_tokens
        if engine.running and draw.random() < 0.2:
            engine.cancel(draw.choice(engine.running))
    for spec, request in zip(specs, requests, strict=True):
        alone = spec.run_alone(network)
        assert request.ids == alone.ids[: len(request.ids)]
        assert request.cancelled or same_outputs([[request.output]], [[alone]])


def test_requests_are_served_first_come_first_served_and_a_full_queue_is_an_error() -> None:
    network = small_network("decoder")
    engine = Engine(network, eos_ids=(), config=EngineConfig(max_batch_size=4, cache_tokens=96, max_queue=3))
    long = engine.submit([1] * 40, GenerationConfig(max_new_tokens=21))  # 60 tokens: three pages, and one later
    short = [engine.submit([1], GenerationConfig(max_new_tokens=5)) for _ in range(2)]
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        engine.submit([1], GenerationConfig(max_new_tokens=1))
    engine.step()
    assert engine.running == [long, short[0]]
    with pytest.raises(UserError, match="may need 97 tokens of the KV cache, but cache_tokens is 96"):
        engine.submit([1] * 12, GenerationConfig(max_new_tokens=86))
    while not short[1].ids:
        engine.step()
    assert short[0].done
    assert not long.done
    engine.cancel(long)
    engine.cancel(long)  # a second time does nothing
    while engine.busy:
        engine.step()
    engine.cancel(short[1])
    assert short[1].output is not None
    assert not short[1].cancelled, "a finished request cannot be cancelled"
    assert engine.step() == []


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, "byte-bpe", 300)


@pytest.mark.parametrize("threads", [False, True])
def test_streamed_text_up_to_the_stop_string_equals_that_of_stream_text(tokenizer: Tokenizer, threads: bool) -> None:
    network, draw = random_network("decoder", len(tokenizer), decoder_layers=1), random.Random(4)
    end, specs = tokenizer.id("end"), []
    for seed in range(60):
        prompt = tokenizer.encode(draw.choice(TEXTS))[: draw.randint(1, 5)]
        config = GenerationConfig(max_new_tokens=30, temperature=draw.choice([0.0, 1.0]))
        text = "".join(stream_text(network, prompt, config, tokenizer, eos_ids=end, seed=seed))
        starts = draw.sample(range(len(text) + 1), min(2, len(text)))
        stop = [text[start : start + draw.randint(1, 6)] for start in starts] if draw.random() < 0.7 else []
        specs.append((prompt, config, seed, tuple(filter(None, stop))))
    expected = [
        "".join(stream_text(network, prompt, config, tokenizer, eos_ids=end, seed=seed, stop=stop))
        for prompt, config, seed, stop in specs
    ]
    assert len({len(text) for text in expected}) > 10
    engine = Engine(network, eos_ids=end, tokenizer=tokenizer, config=EngineConfig(max_batch_size=7))
    if not threads:
        requests = [engine.submit(prompt, config, seed=seed, stop=stop) for prompt, config, seed, stop in specs]
        pieces: list[list[str]] = [[] for _ in requests]
        while engine.busy:
            advanced = engine.step()
            for number, request in enumerate(requests):
                piece = request.take_text()
                assert not piece or request in advanced
                pieces[number].append(piece)
        assert ["".join(texts) for texts in pieces] == expected == [request.text for request in requests]
        assert max(sum(map(bool, texts)) for texts in pieces) > 5, "text is streamed"
        return
    texts: dict[int, str] = {}
    with EngineThread(engine) as engine_thread:

        def read(number: int) -> None:
            prompt, config, seed, stop = specs[number]
            request = engine_thread.submit(prompt, config, seed=seed, stop=stop)
            texts[number] = "".join(engine_thread.stream(request))

        readers = [threading.Thread(target=read, args=(number,)) for number in range(len(specs))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(30)
    assert [texts[number] for number in range(len(specs))] == expected
    assert not engine.busy


def test_closing_a_stream_frees_its_row(tokenizer: Tokenizer) -> None:
    network = random_network("decoder", len(tokenizer), decoder_layers=1)
    config = GenerationConfig(max_new_tokens=100, temperature=1.0)
    with EngineThread(Engine(network, eos_ids=(), tokenizer=tokenizer)) as engine_thread:
        request = engine_thread.submit([5, 6], config)
        pieces = engine_thread.stream(request)
        assert next(pieces)
        pieces.close()
        assert engine_thread.result(request) is None
        assert engine_thread.engine.running == []
        assert engine_thread.result(engine_thread.submit([5, 6], config)) is not None
        waiting = engine_thread.submit([5, 6], config)
    assert waiting.done
    with pytest.raises(RuntimeError, match="closed"):
        engine_thread.submit([5], config)


def test_an_error_of_the_network_is_raised_in_waiting_threads(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = random_network("decoder", len(tokenizer), decoder_layers=1)
    engine_thread = EngineThread(Engine(network, eos_ids=(), tokenizer=tokenizer))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ReferenceRunner, "launch", fail)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine_thread.result(engine_thread.submit([5], GenerationConfig()))
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine_thread.submit([5], GenerationConfig())
    engine_thread.close()


def test_requests_from_an_iterator_finish_in_order_and_are_read_as_needed() -> None:
    network, specs = small_network("decoder"), random_requests("decoder", 200, random.Random(2))
    engine, read = Engine(network, eos_ids=END, config=EngineConfig(max_batch_size=5)), list[RequestSpec]()
    requests = run_in_order(engine, (read.append(spec) or spec.submit(engine) for spec in specs))
    for done, (request, spec) in enumerate(zip(requests, specs, strict=True)):
        assert same_outputs([[request.output]], [[spec.run_alone(network)]])
        assert len(read) - done <= 20
    abandoned = run_in_order(engine, (spec.submit(engine) for spec in specs))
    next(abandoned)
    assert engine.busy
    abandoned.close()
    assert not engine.busy, "the requests in flight are cancelled"


def test_an_iterator_that_pauses_or_fails_loses_no_request() -> None:
    network, specs = small_network("decoder"), random_requests("decoder", 12, random.Random(3))
    engine, finished = Engine(network, eos_ids=END, config=EngineConfig(max_batch_size=5)), list[EngineRequest]()

    def requests() -> Iterator[EngineRequest | None]:
        for number, spec in enumerate(specs):
            yield spec.submit(engine)
            while number == 6 and len(finished) < 7:  # no new request until these are finished
                yield None
        raise UserError("line 13 is bad")

    def run() -> None:
        for request in run_in_order(engine, requests()):
            finished.append(request)

    with pytest.raises(UserError, match="line 13"):
        run()
    assert len(finished) == 12
    for request, spec in zip(finished, specs, strict=True):
        assert same_outputs([[request.output]], [[spec.run_alone(network)]])
    assert not engine.busy


def test_the_engine_keeps_no_reference_to_finished_requests() -> None:
    engine = Engine(small_network("decoder"), eos_ids=())
    request = weakref.ref(engine.submit([1], GenerationConfig(max_new_tokens=2)))
    while engine.busy:
        engine.step()
    gc.collect()
    assert request() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "prompt 1 is empty"),
        ({"prompt": [99]}, "token 99 is outside the vocabulary"),
        ({"prompt": [1] * 129}, "129 tokens, but the model has 128 positions"),
        ({"config": GenerationConfig(beam=2)}, "use beam=1"),
        ({"config": GenerationConfig(samples=2, temperature=1.0)}, "samples=1"),
        ({"seed": 1 << 63}, "a seed is a 64-bit integer"),
        ({"stop": ["x"]}, "stop strings need an engine with a tokenizer"),
    ],
)
def test_invalid_requests_are_refused_before_they_are_queued(change: dict[str, Any], message: str) -> None:
    engine = Engine(small_network("decoder"), eos_ids=END)
    request: dict[str, Any] = {"prompt": [1], "config": GenerationConfig()} | change
    with pytest.raises(ValueError, match=message):
        engine.submit(request.pop("prompt"), request.pop("config"), **request)
    assert not engine.busy
    with pytest.raises(ConfigError, match="max_batch_size: 0 is too small"):
        EngineConfig.build({"max_batch_size": 0})
    with pytest.raises(ValueError, match="eval"):
        Engine(small_network("decoder").train(), eos_ids=END)
