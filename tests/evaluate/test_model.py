"""Evaluation on the test set of a recipe, on held-out training data, and on other files."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from clearhead.checkpoint import save_model
from clearhead.config import preset
from clearhead.config.data import Corpus, DataConfig
from clearhead.data import Loader, prepare
from clearhead.errors import UserError
from clearhead.evaluate import spearman
from clearhead.evaluate.model import evaluate
from clearhead.model import build
from clearhead.predict import Model, Translation, load
from clearhead.text import ROLES, train
from tests.file_operations import operations_outside
from tests.predict.task_models import LABELS, task_model

SMALL = ("dim=16", "heads=2", "ff_dim=32", "max_positions=256")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "own-cache"))


def make_model(name: str, folder: Path, **data: Any) -> Model:
    tokenizer = train(["a b c d"] * 9, "word", 16, roles=ROLES)
    network = build(preset(name, [*SMALL, f"vocab_size={len(tokenizer)}"])).eval()
    return Model(network, (tokenizer,), {"data": data | {"cache_dir": str(folder / "cache"), "workers": 0}})


def test_a_translator_is_evaluated_on_held_out_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"A {n}\tB {n}\n" for n in range(100)), encoding="utf-8")
    corpus = {"format": "tsv", "files": str(file), "columns": {"source": 1, "target": 2}}
    model = make_model(
        "tiny-translator", tmp_path, task="translation", train=corpus, held_out=0.2, lowercase=True, normalize="nfc"
    )
    translated: list[str] = []
    echo = lambda self, texts, **_: translated.extend(texts) or [Translation(text) for text in texts]  # noqa: E731
    monkeypatch.setattr(Model, "translate", echo)
    log: list[str] = []
    result = evaluate(model, log=log.append)
    config = DataConfig.build(model.extra["data"])
    data = prepare(config, model.tokenizers)
    assert data.valid is not None
    assert result["texts"] == len(translated) == data.valid.num_samples(0)
    assert 5 < result["texts"] < 50
    assert translated[0].startswith("A "), "sources and references are not normalized or lowercased"
    assert "the held-out 20.0% of the training data" in log[0]


def test_a_language_model_is_evaluated_on_held_out_data(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("a b c d\n" * 300, encoding="utf-8")
    corpus = {"format": "text", "files": str(file)}
    model = make_model("tiny-gpt", tmp_path, task="language-model", train=corpus, held_out=0.1, max_length=16)
    result = evaluate(model)
    valid = prepare(DataConfig.build(model.extra["data"]), model.tokenizers).valid
    assert valid is not None
    batches = [batch for step in Loader(valid, batch_tokens=4096, shuffle=False, workers=0) for batch in step.batches]
    assert result["tokens"] == sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    assert 60 < result["tokens"] < 200


def test_held_out_texts_are_unseen_unless_they_come_from_another_file(tmp_path: Path) -> None:
    file = tmp_path / "texts.tsv"
    file.write_text("".join(f"cat {n:02}\t{LABELS[n % 5]}\n" for n in range(60)))
    corpus = {"format": "tsv", "files": [str(file)]}
    model = task_model("classes", train=corpus, held_out=0.3)
    result = evaluate(model, unseen=True)
    assert result["unseen_texts"] == result["texts"]
    assert 5 < result["texts"] < 40
    assert result["unseen_accuracy"] == result["accuracy"]
    other = evaluate(model, [Corpus.build(corpus)], unseen=True)
    assert (other["texts"], other["unseen_texts"]) == (60, 0)


def save_run(run: Path, model: Model, name: str = "best") -> Path:
    save_model(run / name, model.network, model.own_tokenizers, model.extra)
    return run / name


def test_files_named_by_a_models_config_are_never_read_or_written(tmp_path: Path) -> None:
    """A received model names a file of this machine and a cache folder; nothing is opened there."""
    secret, cache = tmp_path / "home" / "secret", tmp_path / "home" / "cache"
    secret.parent.mkdir()
    secret.write_text("a b c d\n" * 99)
    corpus = {"format": "text", "files": str(secret)}
    symbols = {"format": "symbols", "count": 9}
    for data in ({"test": corpus}, {"valid": corpus}, {"train": corpus, "held_out": 0.5}):
        made = make_model("tiny-gpt", tmp_path, task="language-model", **{"train": symbols} | data)
        made.extra["data"]["cache_dir"] = str(cache)
        shutil.rmtree(tmp_path / "received", ignore_errors=True)
        folder = save_run(tmp_path / "received", made)
        with operations_outside(tmp_path / "received") as outside:
            loaded = load(folder, "cpu")
            for model in (loaded, load(folder.parent, "cpu")):
                with pytest.raises(UserError, match=r"its config\.json names data files \('.*secret'\).*--data"):
                    evaluate(model)
        assert not [operation for operation in outside if "home" in operation]
        assert evaluate(loaded, [Corpus.build(corpus)])["tokens"] > 99
        assert not cache.exists(), "the cache is the user's, not the model's"


def test_files_of_a_run_are_read_if_its_recipe_names_them(tmp_path: Path) -> None:
    files = [tmp_path / "text", tmp_path / "other"]
    for file in files:
        file.write_text("a b c d\n" * 99, encoding="utf-8")
    data = {"task": "language-model", "test": {"format": "text", "files": str(files[0])}, "max_length": 16}
    run = save_run(tmp_path / "run", make_model("tiny-gpt", tmp_path, **data)).parent
    for named, allowed in ((files[1], False), (files[0], True)):
        recipe = {"data": {"task": "language-model", "test": {"format": "text", "files": [str(named)]}}}
        (run / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
        log: list[str] = []
        if allowed:
            assert evaluate(load(run, "cpu"), log=log.append)["tokens"] > 99
            assert log == [f"reading {str(named)!r}, named by {run / 'recipe.yaml'}"]
        else:
            with pytest.raises(UserError, match="which are read only from a run folder"):
                evaluate(load(run, "cpu"), log=log.append)
    (run / "lr-1-seed-0").mkdir()
    (run / "recipe.yaml").rename(run / "lr-1-seed-0" / "recipe.yaml")
    assert evaluate(load(run, "cpu"))["tokens"] > 99, "the best model of a sweep"
    (run / "lr-1-seed-0" / "recipe.yaml").unlink()
    os.mkfifo(run / "recipe.yaml")
    with pytest.raises(UserError, match="which are read only from a run folder"):
        evaluate(load(run, "cpu"))


def test_synthetic_data_of_a_model_is_used_without_asking(tmp_path: Path) -> None:
    model = make_model("tiny-gpt", tmp_path, task="language-model", test={"format": "embedded", "languages": "en"})
    model.extra["data"] |= {"test": {"format": "embedded", "languages": ["en"], "count": 9}, "max_length": 16}
    assert evaluate(load(save_run(tmp_path / "run", model), "cpu"))["tokens"] > 9


def test_a_missing_test_set_is_an_error(tmp_path: Path) -> None:
    corpus = {"format": "symbols", "count": 5}
    with pytest.raises(UserError, match="names no test or validation set; name one with --data"):
        evaluate(make_model("tiny-translator", tmp_path, task="translation", train=corpus))


def test_an_imported_model_is_evaluated_on_the_task_of_its_head(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("a b,a b,5\na b,c d,0\na c,a d,3\nb,d,1\n", encoding="utf-8")
    corpus = Corpus.build({"format": "csv", "files": [str(file)]})
    model = make_model("tiny-encoder", tmp_path, task="similarity")
    texts = [line.split(",") for line in file.read_text().splitlines()]
    vectors = [model.embed([row[side] for row in texts]) for side in (0, 1)]
    result = evaluate(Model(model.network, model.tokenizers, {"pooling": "mean"}), [corpus])
    assert result["spearman"] == spearman((vectors[0] * vectors[1]).sum(1).tolist(), [float(row[2]) for row in texts])
    with pytest.raises(UserError, match=r"vectors: no task in config\.json; fine-tune it with a recipe"):
        evaluate(Model(model.network, model.tokenizers, {}, "vectors"), [corpus])
