"""Sentence encoders go there and back with their pooling; what is neither the mean nor the first token is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import export_model, import_model, read_foreign
from clearhead.errors import UserError
from tests.checkpoint.formats.peers import saved

KIND = "sentence_transformers.models"


def sentences(folder: Path, modes: dict[str, Any], normalized: bool) -> None:
    """A folder as sentence-transformers writes it."""
    saved("bert", folder)
    names = ["Transformer", "Pooling", *(["Normalize"] if normalized else [])]
    (folder / "modules.json").write_text(json.dumps([{"idx": n, "type": f"{KIND}.{x}"} for n, x in enumerate(names)]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48} | modes))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("pooling", "mode"), [("mean", "mean_tokens"), ("class", "cls_token")])
def test_pooling_goes_there_and_back(pooling: str, mode: str, normalized: bool, tmp_path: Path) -> None:
    modes = {f"pooling_mode_{name}": name == mode for name in ("mean_tokens", "cls_token", "max_tokens")}
    sentences(tmp_path / "theirs", modes, normalized)
    import_model(tmp_path / "theirs", tmp_path / "ours")
    export_model(load_model(tmp_path / "ours"), tmp_path / "back", "hf")
    for folder in ("theirs", "back"):
        found = read_foreign(tmp_path / folder).extra
        assert found == {"pooling": pooling, "normalized": normalized, "max_length": 40}
    modules = json.loads((tmp_path / "back" / "modules.json").read_text())
    assert [module["type"].removeprefix(f"{KIND}.") for module in modules] == [
        "Transformer",
        "Pooling",
        *(["Normalize"] if normalized else []),
    ]


@pytest.mark.parametrize("also", [{}, {"pooling_mode_mean_tokens": True}])
def test_another_pooling_is_refused_by_name(also: dict[str, bool], tmp_path: Path) -> None:
    sentences(tmp_path, {"pooling_mode_max_tokens": True} | also, normalized=True)
    with pytest.raises(UserError, match="pooling other than the mean or the first token"):
        read_foreign(tmp_path)


@pytest.mark.parametrize(("mode", "pooling"), [("mean", "mean"), ("cls", "class")])
def test_newer_folders_name_their_pooling(mode: str, pooling: str, tmp_path: Path) -> None:
    sentences(tmp_path, {"pooling_mode": mode}, normalized=True)
    modules = tmp_path / "modules.json"
    modules.write_text(modules.read_text().replace(f"{KIND}.", "sentence_transformers.base.modules.some."))
    (tmp_path / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}')
    assert read_foreign(tmp_path).extra == {"pooling": pooling, "normalized": True}


@pytest.mark.parametrize(
    ("file", "said", "named"),
    [
        ("sentence_bert_config.json", {"do_lower_case": True}, "lower case before the tokenizer"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "a prompt before every text"),
    ],
)
def test_what_is_done_to_a_text_beforehand_is_refused_by_name(file: str, said: Any, named: str, tmp_path: Path) -> None:
    sentences(tmp_path, {"pooling_mode_mean_tokens": True}, normalized=True)
    (tmp_path / file).write_text(json.dumps(said))
    with pytest.raises(UserError, match=named):
        read_foreign(tmp_path)


def test_a_layer_behind_the_pooling_is_refused_by_name(tmp_path: Path) -> None:
    sentences(tmp_path, {"pooling_mode_mean_tokens": True}, normalized=True)
    modules = tmp_path / "modules.json"
    modules.write_text(modules.read_text().replace("Normalize", "Dense"))
    with pytest.raises(UserError, match="Transformer, Pooling, Dense: cannot be represented"):
        read_foreign(tmp_path)
