"""The engine: whatever joins, leaves or is cancelled, every text is the one it would have been alone; nothing leaks."""

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
from clearhead.inference import Engine, GenerationOutput, Job, QueueFull, Worker, in_order, stream_text, translate
from clearhead.inference.engine import Step
from clearhead.text import Tokenizer, train
from tests.inference.random_writers import FEW, rows_for, same, sharpened, writers
from tests.inference.reference import BEGIN, END, Row, search
from tests.inference.test_texts import TEXTS, writer

REQUESTS = int(os.environ.get("CLEARHEAD_REQUESTS", "0"))  # `make torture` asks for many, all of them different


class Asked(NamedTuple):
    """A request: source and prompt, options, seed."""

    row: Row
    config: GenerationConfig
    seed: int

    def submit(self, engine: Engine) -> Job:
        source, prompt = self.row
        return engine.submit(prompt, self.config, seed=self.seed, source=source or None)

    def alone(self, network: Any) -> GenerationOutput:
        [[output]] = search(network, [self.row], self.config, seeds=[self.seed])
        return output


def options(draw: random.Random, max_length: int) -> GenerationConfig:
    """Random ones, often the same as another's."""
    given: dict[str, Any] = {"max_new_tokens": draw.randint(1, max_length), "scores": draw.random() < 0.3}
    given["min_new_tokens"] = draw.choice([0, min(3, given["max_new_tokens"])])
    if draw.random() < 0.5:
        given |= {
            "temperature": draw.choice([0.7, 1.3]),
            "top_k": draw.choice([0, 5]),
            "top_p": draw.choice([1.0, 0.9]),
        }
    if draw.random() < 0.2:
        given |= {"repetition_penalty": 1.5, "no_repeat_ngram": 2}
    if draw.random() < 0.1:
        given |= {"forced": ((3, 4),), "banned": ((5,), (6, 7)), "max_new_tokens": max_length, "presence_penalty": 0.5}
    return GenerationConfig(**given)


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def encoder_output() -> int:
    """Bytes that this process holds; 0 where that cannot be asked."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def small(family: str) -> Any:
    layers = {"decoder_layers": 1} | ({"encoder_layers": 1} if family == "encoder-decoder" else {})
    torch.manual_seed(5)
    return writer(family, 24, **layers)


def some(family: str, count: int, draw: random.Random, max_length: int = 12) -> list[Asked]:
    config = small(family).config
    return [
        Asked(
            rows_for(config, draw.randrange(1 << 30), count=1, max_length=10)[0],
            options(draw, max_length),
            draw.randrange(99),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_ten_thousand_requests_at_random_times_a_fifth_of_them_cancelled(family: str) -> None:
    """The same few hundred requests in ever other company; a long run (`make torture`) takes all of them different."""
    draw, network = random.Random(family), small(family)
    different = some(family, REQUESTS or 300, draw)
    expected = [asked.alone(network) for asked in different]
    total, sent, cancelled = REQUESTS or 10_000, 0, dict.fromkeys(["waiting", "first", "last", "between"], 0)
    engine = Engine(
        network, end=END, config=EngineConfig(max_batch_size=48, cache_tokens=2048, prefill_tokens=256, max_queue=64)
    )
    under_way: dict[Job, tuple[int, int | None]] = {}  # which request, and after how many tokens it is cancelled
    before = settled = tensors_alive()
    while sent < total or engine.busy:
        for _ in range(min(total - sent, draw.choice([0, 0, 1, 3, 9, 40]), 64 - len(engine.queue))):
            number = sent % len(different)
            under_way[different[number].submit(engine)] = number, fate(draw, expected[number])
            sent += 1
            settled = encoder_output() if sent == total // 10 else settled
        for job, (_, tokens) in under_way.items():
            if tokens == len(job.ids) and not job.done:
                rows, running = len(engine.jobs), job in engine.jobs
                engine.cancel(job)
                assert len(engine.jobs) == rows - running, "the row is free at once"
                assert within_bounds(engine)
        engine.step()
        assert within_bounds(engine)
        for job in [job for job in under_way if job.done]:
            number, tokens = under_way.pop(job)
            whole = expected[number]
            assert job.ids == whole.ids[: len(job.ids)]
            if not job.cancelled:
                assert same([[job.output]], [[whole]])
                continue
            assert job.output is None
            last = len(whole.ids) - (not whole.finished)
            cancelled[{0: "waiting", last: "last", 1: "first"}.get(len(job.ids), "between")] += 1
    assert not under_way
    assert 0.18 < sum(cancelled.values()) / total < 0.22, cancelled
    assert min(cancelled.values()) > total / 100, cancelled
    assert engine._step is None
    assert engine._written is None
    assert tensors_alive() == before
    assert encoder_output() - settled < 16 << 20, "bytes of the process, since a tenth of the requests"


def fate(draw: random.Random, whole: GenerationOutput) -> int | None:
    """After how many tokens a request is cancelled, 0 while it waits; None: not at all."""
    last = len(whole.ids) - (not whole.finished)  # tokens before the step that would be the last
    if draw.random() > 0.2:
        return None
    return draw.choice([0, min(1, last), last, draw.randint(0, last)])


def within_bounds(engine: Engine) -> bool:
    """Every tensor of the cache has a row for each job, and no more memory than was allowed."""
    if engine._step is None:
        return not engine.jobs
    cache, rows = engine._step.cache, len(engine.jobs)
    held = [x for layer in cache.layers for x in (layer.keys, layer.values, *(layer.source or ())) if x is not None]
    dim = 0 if cache.layers[0].source is None else cache.layers[0].source[0].shape[2]
    return rows <= 48 and {len(cache), *map(len, held)} == {rows} and rows * (cache.slots + dim) <= 2048


@FEW
@given(writers, st.integers(0, 2**16), st.integers(1, 9), st.integers(40, 200), st.integers(1, 40))
def test_any_model_in_any_company_writes_what_it_writes_alone(
    config: ModelConfig, seed: int, rows: int, cache_tokens: int, prefill_tokens: int
) -> None:
    draw, network = random.Random(seed), sharpened(config)
    asked = [Asked(row, options(draw, 9), number) for number, row in enumerate(rows_for(config, seed, count=12))]
    limits = EngineConfig(max_batch_size=rows, cache_tokens=cache_tokens, prefill_tokens=prefill_tokens)
    engine, jobs, left = Engine(network, end=END, config=limits), [], list(asked)
    while left or engine.busy:
        for _ in range(min(len(left), draw.randint(0, 3))):
            jobs.append(left.pop(0).submit(engine))
        running = list(engine.jobs)
        joined = [job for job in engine.step() if job not in running]
        assert len(joined) <= 1 or len(joined) * max(len(job.prompt) for job in joined) <= prefill_tokens
        if engine.jobs and draw.random() < 0.2:
            engine.cancel(draw.choice(engine.jobs))
    for each, job in zip(asked, jobs, strict=True):
        alone = each.alone(network)
        assert job.ids == alone.ids[: len(job.ids)]
        assert job.cancelled or same([[job.output]], [[alone]])


def test_nobody_is_overtaken_and_a_full_queue_says_so() -> None:
    network = small("decoder")
    engine = Engine(network, end=(), config=EngineConfig(max_batch_size=4, cache_tokens=60, max_queue=3))
    long = engine.submit([1] * 10, GenerationConfig(max_new_tokens=21))  # 30 slots: two rows at the most
    short = [engine.submit([1], GenerationConfig(max_new_tokens=5)) for _ in range(2)]
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        engine.submit([1], GenerationConfig(max_new_tokens=1))
    engine.step()
    assert engine.jobs == [long, short[0]]
    with pytest.raises(UserError, match="may take 61 tokens, but the engine holds 60"):
        engine.submit([1] * 12, GenerationConfig(max_new_tokens=50))
    while not short[1].ids:
        engine.step()
    assert short[0].done
    assert not long.done
    engine.cancel(long)
    engine.cancel(long)  # twice is once
    while engine.busy:
        engine.step()
    engine.cancel(short[1])
    assert short[1].output is not None
    assert not short[1].cancelled, "what is done cannot be cancelled"
    assert engine.step() == []


def test_memory_of_a_long_row_is_given_back_while_others_go_on() -> None:
    network = small("encoder-decoder")
    engine = Engine(network, end=())
    long = engine.submit([BEGIN] * 60, GenerationConfig(max_new_tokens=60), source=[3] * 50)
    other = engine.submit([BEGIN], GenerationConfig(max_new_tokens=60), source=[3] * 2)
    for _ in range(20):
        engine.step()
    cache = engine._step.cache  # type: ignore[union-attr]
    assert cache.slots >= 79
    engine.cancel(long)
    engine.submit([BEGIN], GenerationConfig(max_new_tokens=3), source=[4] * 3)
    engine.step()
    assert cache.slots == 32
    assert cache.layers[0].source[0].shape[2] == 3  # type: ignore[index]
    assert cache.layers[0].keys.untyped_storage().nbytes() == 2 * 33 * 16 * 8  # type: ignore[union-attr]
    while engine.busy:
        engine.step()
    assert same([[other.output]], translate(network, [[3] * 2], other.config, begin=BEGIN, end=()))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, "byte-bpe", 300)


@pytest.mark.parametrize("threads", [False, True])
def test_text_comes_in_pieces_up_to_the_stop_as_alone(tokenizer: Tokenizer, threads: bool) -> None:
    network, draw = writer("decoder", len(tokenizer), decoder_layers=1), random.Random(4)
    end, asked = tokenizer.id("end"), []
    for seed in range(60):
        prompt = tokenizer.encode(draw.choice(TEXTS))[: draw.randint(1, 5)]
        config = GenerationConfig(max_new_tokens=30, temperature=draw.choice([0.0, 1.0]))
        whole = "".join(stream_text(network, prompt, config, tokenizer, end=end, seed=seed))
        places = draw.sample(range(len(whole) + 1), min(2, len(whole)))
        stop = [whole[place : place + draw.randint(1, 6)] for place in places] if draw.random() < 0.7 else []
        asked.append((prompt, config, seed, tuple(filter(None, stop))))
    expected = [
        "".join(stream_text(network, prompt, config, tokenizer, end=end, seed=seed, stop=stop))
        for prompt, config, seed, stop in asked
    ]
    assert len({len(text) for text in expected}) > 10
    engine = Engine(network, end=end, tokenizer=tokenizer, config=EngineConfig(max_batch_size=7))
    if not threads:
        jobs = [engine.submit(prompt, config, seed=seed, stop=stop) for prompt, config, seed, stop in asked]
        pieces: list[list[str]] = [[] for _ in jobs]
        while engine.busy:
            advanced = engine.step()
            for number, job in enumerate(jobs):
                piece = job.take()
                assert not piece or job in advanced
                pieces[number].append(piece)
        assert ["".join(found) for found in pieces] == expected == [job.text for job in jobs]
        assert max(sum(map(bool, found)) for found in pieces) > 5, "it comes in pieces"
        return
    found: dict[int, str] = {}
    with Worker(engine) as worker:

        def ask(number: int) -> None:
            prompt, config, seed, stop = asked[number]
            found[number] = "".join(worker.pieces(worker.submit(prompt, config, seed=seed, stop=stop)))

        askers = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(30)
    assert [found[number] for number in range(len(asked))] == expected
    assert not engine.busy


def test_who_stops_listening_frees_the_row(tokenizer: Tokenizer) -> None:
    network = writer("decoder", len(tokenizer), decoder_layers=1)
    config = GenerationConfig(max_new_tokens=100, temperature=1.0)
    with Worker(Engine(network, end=(), tokenizer=tokenizer)) as worker:
        job = worker.submit([5, 6], config)
        pieces = worker.pieces(job)
        assert next(pieces)
        pieces.close()
        assert worker.result(job) is None
        assert worker.engine.jobs == []
        assert worker.result(worker.submit([5, 6], config)) is not None
        waiting = worker.submit([5, 6], config)
    assert waiting.done
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit([5], config)


def test_a_failing_network_is_told_to_all_who_wait(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    network = writer("decoder", len(tokenizer), decoder_layers=1)
    worker = Worker(Engine(network, end=(), tokenizer=tokenizer))

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Step, "start", fail)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        worker.result(worker.submit([5], GenerationConfig()))
    with pytest.raises(RuntimeError, match="the engine has failed"):
        worker.submit([5], GenerationConfig())
    worker.close()


def test_a_stream_of_requests_is_answered_in_order_and_read_only_as_needed() -> None:
    network, asked = small("decoder"), some("decoder", 200, random.Random(2))
    engine, read = Engine(network, end=END, config=EngineConfig(max_batch_size=5)), list[Asked]()
    jobs = in_order(engine, (read.append(each) or each.submit(engine) for each in asked))
    for done, (job, each) in enumerate(zip(jobs, asked, strict=True)):
        assert same([[job.output]], [[each.alone(network)]])
        assert len(read) - done <= 20
    left = in_order(engine, (each.submit(engine) for each in asked))
    next(left)
    assert engine.busy
    left.close()
    assert not engine.busy, "nobody asks for the rest"


def test_a_stream_that_pauses_or_breaks_loses_nothing() -> None:
    network, asked = small("decoder"), some("decoder", 12, random.Random(3))
    engine, answered = Engine(network, end=END, config=EngineConfig(max_batch_size=5)), list[Job]()

    def stream() -> Iterator[Job | None]:
        for number, each in enumerate(asked):
            yield each.submit(engine)
            while number == 6 and len(answered) < 7:  # nobody asks more until these are answered
                yield None
        raise UserError("line 13 is bad")

    def take() -> None:
        for job in in_order(engine, stream()):
            answered.append(job)

    with pytest.raises(UserError, match="line 13"):
        take()
    assert len(answered) == 12
    for job, each in zip(answered, asked, strict=True):
        assert same([[job.output]], [[each.alone(network)]])
    assert not engine.busy


def test_a_job_that_nobody_holds_is_forgotten() -> None:
    engine = Engine(small("decoder"), end=())
    job = weakref.ref(engine.submit([1], GenerationConfig(max_new_tokens=2)))
    while engine.busy:
        engine.step()
    gc.collect()
    assert job() is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": []}, "prompt 1 is empty"),
        ({"prompt": [99]}, "token 99 is outside the vocabulary"),
        ({"prompt": [1] * 129}, "129 tokens, but the model has 128 positions"),
        ({"config": GenerationConfig(beam=2)}, "use beam=1"),
        ({"config": GenerationConfig(samples=2, temperature=1.0)}, "samples=1"),
        ({"seed": 1 << 63}, "a seed is a whole number of 64 bits"),
        ({"stop": ["x"]}, "stop strings need an engine with a tokenizer"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_is_queued(change: dict[str, Any], says: str) -> None:
    engine = Engine(small("decoder"), end=END)
    asked: dict[str, Any] = {"prompt": [1], "config": GenerationConfig()} | change
    with pytest.raises(ValueError, match=says):
        engine.submit(asked.pop("prompt"), asked.pop("config"), **asked)
    assert not engine.busy
    with pytest.raises(ConfigError, match="rows: 0 is too small"):
        EngineConfig.build({"rows": 0})
    with pytest.raises(ValueError, match="eval"):
        Engine(small("decoder").train(), end=END)
