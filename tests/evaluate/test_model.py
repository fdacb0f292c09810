"""Scores of a model on the test set of its recipe, or on what was held out of the training data."""

from pathlib import Path
from typing import Any

import pytest

from clearhead.config import preset
from clearhead.config.data import Corpus, DataConfig
from clearhead.data import Loader, prepare
from clearhead.errors import UserError
from clearhead.evaluate import spearman
from clearhead.evaluate.model import evaluate
from clearhead.model import build
from clearhead.predict import Model
from clearhead.text import ROLES, train
from tests.predict.readers import LABELS, reader

SMALL = ("dim=16", "heads=2", "ff_dim=32", "max_positions=256")


def model(name: str, folder: Path, **data: Any) -> Model:
    words = train(["a b c d"] * 9, "word", 16, roles=ROLES)
    network = build(preset(name, [*SMALL, f"vocab_size={len(words)}"])).eval()
    return Model(network, (words,), {"data": data | {"cache_dir": str(folder / "cache"), "workers": 0}})


def test_a_translator_is_scored_on_what_was_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"A {n}\tB {n}\n" for n in range(100)), encoding="utf-8")
    corpus = {"format": "tsv", "files": str(file), "columns": {"source": 1, "target": 2}}
    made = model(
        "tiny-translator", tmp_path, task="translation", train=corpus, held_out=0.2, lowercase=True, normalize="nfc"
    )
    asked: list[str] = []
    monkeypatch.setattr(Model, "translate", lambda self, texts, **_: asked.extend(texts) or list(texts))
    said: list[str] = []
    found = evaluate(made, say=said.append)
    config = DataConfig.build(made.extra["data"])
    data = prepare(config, made.tokenizers)
    assert data.valid is not None
    assert found["texts"] == len(asked) == data.valid.size(0)
    assert 5 < found["texts"] < 50
    assert asked[0].startswith("A "), "references and sources are shown as they are written"
    assert "20.000% of the training data" in said[0]


def test_a_language_model_is_scored_on_what_was_held_out(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("a b c d\n" * 300, encoding="utf-8")
    corpus = {"format": "text", "files": str(file)}
    made = model("tiny-gpt", tmp_path, task="language-model", train=corpus, held_out=0.1, max_length=16)
    found = evaluate(made)
    valid = prepare(DataConfig.build(made.extra["data"]), made.tokenizers).valid
    assert valid is not None
    batches = [batch for step in Loader(valid, tokens=4096, shuffle=False, workers=0) for batch in step.batches]
    assert found["tokens"] == sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    assert 60 < found["tokens"] < 200


def test_what_was_held_out_is_unseen_unless_a_file_repeats_it(tmp_path: Path) -> None:
    file = tmp_path / "texts.tsv"
    file.write_text("".join(f"cat {n:02}\t{LABELS[n % 5]}\n" for n in range(60)))
    corpus = {"format": "tsv", "files": [str(file)]}
    made = reader("classes", train=corpus, held_out=0.3)
    found = evaluate(made, unseen=True)
    assert found["unseen_texts"] == found["texts"]
    assert 5 < found["texts"] < 40
    assert found["unseen_accuracy"] == found["accuracy"]
    again = evaluate(made, [Corpus.build(corpus)], unseen=True)
    assert (again["texts"], again["unseen_texts"]) == (60, 0)


def test_without_anything_to_score_on_it_says_so(tmp_path: Path) -> None:
    corpus = {"format": "symbols", "count": 5}
    with pytest.raises(UserError, match="names no test or validation set; name one with --data"):
        evaluate(model("tiny-translator", tmp_path, task="translation", train=corpus))


def test_a_model_from_elsewhere_is_scored_by_what_it_can_do(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("a b,a b,5\na b,c d,0\na c,a d,3\nb,d,1\n", encoding="utf-8")
    corpus = Corpus.build({"format": "csv", "files": [str(file)]})
    made = model("tiny-encoder", tmp_path, task="similarity")
    texts = [line.split(",") for line in file.read_text().splitlines()]
    vectors = [made.embed([row[side] for row in texts]) for side in (0, 1)]
    found = evaluate(Model(made.network, made.tokenizers, {"pooling": "mean"}), [corpus])
    assert found["spearman"] == spearman((vectors[0] * vectors[1]).sum(1).tolist(), [float(row[2]) for row in texts])
    with pytest.raises(UserError, match="vectors does not say what it was trained for; fine-tune it with a recipe"):
        evaluate(Model(made.network, made.tokenizers, {}, "vectors"), [corpus])
