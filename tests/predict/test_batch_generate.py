"""The batching engine: streams of prompts and submitted requests give the texts of single calls."""

from pathlib import Path

import pytest

from clearhead.errors import ConfigError, UserError
from clearhead.predict import engine_for, generate_batch_texts, load, submit
from tests.cli.models import make

TEXTS = ["a man sees the dog", "", "the dog", "a café", "the dog and a man and the dog"] * 3


def test_a_stream_of_prompts_gives_the_texts_of_single_calls(tmp_path: Path) -> None:
    model = load(make(tmp_path / "gpt", "tiny-gpt"), "cpu", "fp64")
    pairs = list(
        generate_batch_texts(model, iter(TEXTS), seed=7, stop=["e"], samples=2, temperature=1.0, max_new_tokens=9)
    )
    assert [prompt for prompt, _ in pairs] == [text for text in TEXTS for _ in range(2)]
    single = model.generate(TEXTS, seed=7, stop=["e"], samples=2, temperature=1.0, max_new_tokens=9)
    assert [result for _, result in pairs] == [result for best in single for result in best.candidates]


def test_translations_of_the_engine_are_the_greedy_ones(tmp_path: Path) -> None:
    model = load(make(tmp_path / "tr", "tiny-translator"), "cpu", "fp64")
    engine = engine_for(model, max_batch_size=4)
    jobs = [submit(model, engine, text, max_new_tokens=11) for text in TEXTS]
    while engine.busy:
        engine.step()
    assert [job.text for job in jobs] == [each.text for each in model.translate(TEXTS, max_new_tokens=11)]
    assert jobs[1].done
    assert submit(model, engine, "a man").limit == 32, "as long as a translation of two words and an end may be"


def test_requests_of_the_threaded_engine_give_the_texts_of_single_calls(tmp_path: Path) -> None:
    model = load(make(tmp_path / "gpt", "tiny-gpt"), "cpu", "fp64")
    expected = [model.generate(text, seed=n, temperature=1.0, max_new_tokens=9) for n, text in enumerate(TEXTS)]
    with model.engine(max_batch_size=3) as engine:
        requests = [engine.submit(text, seed=n, temperature=1.0, max_new_tokens=9) for n, text in enumerate(TEXTS)]
        assert "".join(requests[0]) == expected[0].text
        assert [request.result() for request in requests] == expected
        stopped = engine.submit(TEXTS[0], stop=["e"], max_new_tokens=20).result()
        assert stopped == model.generate(TEXTS[0], stop=["e"], max_new_tokens=20)
        endless = engine.submit("a man", max_new_tokens=100, min_new_tokens=100)
        endless.cancel()
        assert not endless.result().finished
    with pytest.raises(RuntimeError, match="the engine was closed"):
        engine.submit("a man", max_new_tokens=5)


def test_the_threaded_engine_translates(tmp_path: Path) -> None:
    model = load(make(tmp_path / "tr", "tiny-translator"), "cpu", "fp64")
    with model.engine() as engine:
        requests = [engine.submit(text, max_new_tokens=11) for text in TEXTS[:4]]
        assert [request.result() for request in requests] == model.translate(TEXTS[:4], max_new_tokens=11)


def test_invalid_requests_are_refused(tmp_path: Path) -> None:
    gpt = load(make(tmp_path / "gpt", "tiny-gpt"), "cpu")
    with pytest.raises(ConfigError, match="max_batch_size: 0 is too small"):
        engine_for(gpt, max_batch_size=0)
    with pytest.raises(UserError, match="prompt: 301 tokens and 1 more"):
        submit(gpt, engine_for(gpt), "a" * 300)
    with pytest.raises(UserError, match=r"generate: .* is an encoder"):
        engine_for(load(make(tmp_path / "bert", "tiny-encoder"), "cpu"))
