"""Sentence encoders are imported and exported with their pooling; other modules are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import export_model, import_model, read_foreign
from clearhead.errors import UserError
from tests.checkpoint.formats.peers import saved

KIND = "sentence_transformers.models"


def save_sentence_encoder(folder: Path, modes: dict[str, Any], normalized: bool, name: str = "bert") -> None:
    """Save a folder in the format of sentence-transformers."""
    saved(name, folder)
    names = ["Transformer", "Pooling", *(["Normalize"] if normalized else [])]
    (folder / "modules.json").write_text(json.dumps([{"idx": n, "type": f"{KIND}.{x}"} for n, x in enumerate(names)]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48} | modes))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("pooling", "mode"), [("mean", "mean_tokens"), ("cls", "cls_token")])
@pytest.mark.parametrize("base", ["bert", "roberta", "distilbert", "modernbert"])
def test_pooling_survives_a_round_trip(base: str, pooling: str, mode: str, normalized: bool, tmp_path: Path) -> None:
    modes = {f"pooling_mode_{name}": name == mode for name in ("mean_tokens", "cls_token", "max_tokens")}
    save_sentence_encoder(tmp_path / "theirs", modes, normalized, base)
    import_model(tmp_path / "theirs", tmp_path / "ours")
    export_model(load_model(tmp_path / "ours"), tmp_path / "back", "hf")
    for folder in ("theirs", "back"):
        extra = read_foreign(tmp_path / folder).extra
        assert extra == {"pooling": pooling, "normalized": normalized, "max_length": 40}
    modules = json.loads((tmp_path / "back" / "modules.json").read_text())
    assert [module["type"].removeprefix(f"{KIND}.") for module in modules] == [
        "Transformer",
        "Pooling",
        *(["Normalize"] if normalized else []),
    ]


@pytest.mark.parametrize("other_modes", [{}, {"pooling_mode_mean_tokens": True}])
def test_other_poolings_are_refused(other_modes: dict[str, bool], tmp_path: Path) -> None:
    save_sentence_encoder(tmp_path, {"pooling_mode_max_tokens": True} | other_modes, normalized=True)
    with pytest.raises(UserError, match="pooling other than mean or cls"):
        read_foreign(tmp_path)


@pytest.mark.parametrize(("mode", "pooling"), [("mean", "mean"), ("cls", "cls")])
def test_pooling_is_read_from_newer_folders(mode: str, pooling: str, tmp_path: Path) -> None:
    save_sentence_encoder(tmp_path, {"pooling_mode": mode}, normalized=True)
    modules = tmp_path / "modules.json"
    modules.write_text(modules.read_text().replace(f"{KIND}.", "sentence_transformers.base.modules.some."))
    (tmp_path / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}')
    assert read_foreign(tmp_path).extra == {"pooling": pooling, "normalized": True}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("sentence_bert_config.json", {"do_lower_case": True}, "lowercasing before the tokenizer"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "a prompt before each text"),
    ],
)
def test_preprocessing_of_texts_is_refused(file: str, content: Any, message: str, tmp_path: Path) -> None:
    save_sentence_encoder(tmp_path, {"pooling_mode_mean_tokens": True}, normalized=True)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        read_foreign(tmp_path)


def test_a_layer_after_pooling_is_refused(tmp_path: Path) -> None:
    save_sentence_encoder(tmp_path, {"pooling_mode_mean_tokens": True}, normalized=True)
    modules = tmp_path / "modules.json"
    modules.write_text(modules.read_text().replace("Normalize", "Dense"))
    with pytest.raises(UserError, match="Transformer, Pooling, Dense: not supported"):
        read_foreign(tmp_path)
