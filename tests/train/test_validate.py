"""Validation during training: BLEU is tokenized for the target language."""

from pathlib import Path

import pytest

from clearhead.config.recipe import load_recipe
from clearhead.config.train import TrainConfig
from clearhead.evaluate.bleu import chrf
from clearhead.evaluate.labeled import _worst
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


def test_a_translator_logs_its_worst_translations_and_a_picture_of_attention(tmp_path: Path) -> None:
    run(tmp_path / "run", recipe("translator", steps=1, eval_samples=12))
    [validation] = events(tmp_path / "run", "validation")
    scores = [chrf([each["output"]], [each["reference"]]).value for each in validation["mistakes"]]
    assert len(scores) == 5
    assert scores == sorted(scores)
    assert [each["mistake"] for each in validation["mistakes"]] == [f"chrF {score:.1f}" for score in scores]
    drawn = validation["attention"]
    assert len(drawn["weights"]) == len(drawn["target"]) > 0
    for row in drawn["weights"]:
        assert len(row) == len(drawn["source"])
        assert sum(row) == pytest.approx(1, abs=0.01)
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "<h2>Attention" in text
    assert "<h2>Worst mistakes" in text


def test_the_worst_mistakes_of_a_labeled_task_are_logged() -> None:
    rows = [{"source": str(n), "reference": "a", "output": "b"} for n in range(9)]
    sizes = [0.0, 0.2, 0.9, 0.0, 0.4, 0.3, 0.8, 0.7, 0.1]
    worst = _worst(rows, sizes, lambda size: f"off by {size}")
    assert [row["source"] for row in worst] == ["2", "6", "7", "4", "5"]
    assert worst[0]["mistake"] == "off by 0.9"
    assert _worst(rows[:1], sizes[:1], str) == [], "no mistake"


@pytest.mark.parametrize(("steps", "every"), [(5, 1), (60, 6), (5000, 500), (100_000, 500)])
def test_a_run_validates_ten_times_or_every_500_steps(steps: int, every: int) -> None:
    assert TrainConfig.build({"steps": steps}).validate_every == every


def test_the_recipe_into_chinese_names_its_target_language() -> None:
    assert load_recipe("mini-en-zh").data.target_language == "zh"
