"""Validation during training: BLEU is tokenized for the target language."""

from pathlib import Path

import pytest

from clearhead.config.recipe import load_recipe
from tests.train.tiny import EMBEDDED, FAMILIES, events, recipe, run


@pytest.mark.parametrize(("language", "tokenizer"), [("", "zh"), ("zh", "zh"), ("de", "13a")])
def test_bleu_is_tokenized_for_the_target_language(
    language: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chinese = EMBEDDED | {"languages": ["en", "zh"]}
    data = FAMILIES["translator"]["data"] | {"target_language": language, "max_length": 24}
    data |= {"train": chinese | {"count": 60}, "valid": chinese | {"count": 8, "split": "valid"}}
    translator = FAMILIES["translator"] | {"data": data, "tokenizer": {"kind": "char", "vocab_size": 200}}
    monkeypatch.setitem(FAMILIES, "translator", translator)
    run(tmp_path / "run", recipe("translator", steps=1))
    [validation] = events(tmp_path / "run", "validation")
    assert f"|tok:{tokenizer}|" in validation["signature"]["bleu"]


def test_the_recipe_into_chinese_names_its_target_language() -> None:
    assert load_recipe("mini-en-zh").data.target_language == "zh"
