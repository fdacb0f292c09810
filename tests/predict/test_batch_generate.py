"""A model behind the engine: streams of prompts and requests by hand give the texts that single calls give."""

from pathlib import Path

import pytest

from clearhead.errors import ConfigError, UserError
from clearhead.predict import engine_for, generate_batch_texts, load, submit
from tests.cli.models import make

TEXTS = ["a man sees the dog", "", "the dog", "a café", "the dog and a man and the dog"] * 3


def test_a_stream_of_prompts_gives_the_texts_of_single_calls(tmp_path: Path) -> None:
    model = load(make(tmp_path / "gpt", "tiny-gpt"), "cpu", "float64")
    found = list(
        generate_batch_texts(model, iter(TEXTS), seed=7, stop=["e"], samples=2, temperature=1.0, max_new_tokens=9)
    )
    assert [prompt for prompt, _ in found] == [text for text in TEXTS for _ in range(2)]
    several = model.generate(TEXTS, seed=7, stop=["e"], samples=2, temperature=1.0, max_new_tokens=9)
    assert [text for _, text in found] == [text for row in several for text in row]


def test_translations_through_the_engine_are_the_greedy_ones(tmp_path: Path) -> None:
    model = load(make(tmp_path / "tr", "tiny-translator"), "cpu", "float64")
    engine = engine_for(model, rows=4)
    jobs = [submit(model, engine, text, max_new_tokens=11) for text in TEXTS]
    while engine.busy:
        engine.step()
    assert [job.text for job in jobs] == model.translate(TEXTS, max_new_tokens=11)
    assert jobs[1].done
    assert submit(model, engine, "a man").limit == 32, "as long as a translation of two words and an end may be"


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    gpt = load(make(tmp_path / "gpt", "tiny-gpt"), "cpu")
    with pytest.raises(ConfigError, match="rows: 0 is too small"):
        engine_for(gpt, rows=0)
    with pytest.raises(UserError, match="prompt: 301 tokens and 256 more"):
        submit(gpt, engine_for(gpt), "a" * 300)
    with pytest.raises(UserError, match=r"generate: .* is an encoder"):
        engine_for(load(make(tmp_path / "bert", "tiny-encoder"), "cpu"))
