"""Sampling settings of a generation_config.json: read, used by chat where no other value is given, shown, written."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

import clearhead
from clearhead.checkpoint.formats import import_model
from clearhead.checkpoint.formats.sampling_defaults import read_sampling, write_sampling
from clearhead.cli import app
from clearhead.cli.chat import chat_options
from tests.checkpoint.formats.peers import LLAMA
from tests.checkpoint.small_models import tokenizer

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with the settings of Qwen2.5-Instruct."""
    where = tmp_path_factory.mktemp("sampling")
    tokens = tokenizer()
    config = transformers.Qwen2Config(**{**LLAMA, "num_key_value_heads": 2, "vocab_size": len(tokens)})
    transformers.Qwen2ForCausalLM(config).save_pretrained(where / "theirs")
    tokens.save(where / "theirs")
    (where / "theirs" / "generation_config.json").write_text(json.dumps(QWEN | {"eos_token_id": tokens.id("end")}))
    import_model(where / "theirs", where / "ours")
    return where


def test_chat_uses_the_settings_of_the_model(folder: Path) -> None:
    model = clearhead.load(folder / "ours", device="cpu")
    options = model.chat().options
    assert {key: options[key] for key in ("temperature", "top_p", "top_k", "repetition_penalty")} == {
        key: value for key, value in QWEN.items() if key != "do_sample"
    }
    assert model.chat(temperature=0.0, top_k=3).options["top_k"] == 3
    assert model.chat(temperature=0.0).options["temperature"] == 0.0
    assert model.chat(seed=1, max_new_tokens=8).ask("Hello") == model.chat(seed=1, max_new_tokens=8).ask("Hello")


def test_they_are_shown_and_written(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["info", str(folder / "ours")]).output
    assert "temperature 0.7, top_k 20, top_p 0.8" in shown
    clearhead.load(folder / "ours", device="cpu").export(folder / "back", to="hf")
    written = json.loads((folder / "back" / "generation_config.json").read_text())
    assert {key: written[key] for key in QWEN} == QWEN


@pytest.mark.parametrize(
    ("defaults", "given", "expected"),
    [
        ({}, (None, None), {"temperature": 0.8, "top_p": 0.95}),
        ({"temperature": 0.6, "top_p": 0.9}, (None, None), {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "top_p": 0.9}, (1.1, 0.5), {"temperature": 1.1, "top_p": 0.5}),
        ({"temperature": 0.6, "top_k": 9}, (0.0, None), {"temperature": 0.0, "top_k": 0}),
    ],
)
def test_given_values_come_before_those_of_the_model(
    defaults: dict[str, Any], given: tuple[float | None, float | None], expected: dict[str, Any]
) -> None:
    assert chat_options(defaults, *given) == expected


def test_without_sampling_only_the_penalty_is_read_and_wrong_values_are_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert read_sampling({"temperature": 0.3, "repetition_penalty": 1.2}, "g.json") == {"repetition_penalty": 1.2}
    assert read_sampling(QWEN, "g.json") == {key: value for key, value in QWEN.items() if key != "do_sample"}
    assert write_sampling({"repetition_penalty": 1.2}) == {"repetition_penalty": 1.2}
    for wrong in ({"temperature": -1}, {"top_p": 7.0}, {"top_k": 1.5}, {"repetition_penalty": 0}):
        assert read_sampling({"do_sample": True, **wrong}, "g.json") == {}
    assert "g.json: temperature" in caplog.text
    assert read_sampling({"do_sample": True, "temperature": "hot", "top_k": [1]}, "g.json") == {}
