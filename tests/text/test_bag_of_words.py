"""Bag of words: counts and tf-idf computed by hand, the minimum of the classifier loss, accuracy on real data."""

import json
import math
from pathlib import Path

import pytest
import torch

from clearhead.errors import UserError
from clearhead.files import read_lines
from clearhead.text.bag_of_words import BagOfWords, LinearClassifier
from clearhead.text.tensors import save_tensors
from tests.corpora import corpus

TEXTS = ["the cat sat", "The cat, the dog!", "a dog"]


def test_counts_match_the_texts() -> None:
    bag = BagOfWords.fit(TEXTS)
    assert list(bag.vocab) == ["cat", "dog", "the", "a", "sat"]  # by document count, then alphabetically
    assert bag.counts(["the the cat zebra", "", "dog"]).to_dense().tolist() == [
        [1, 0, 2, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]
    ]  # fmt: skip
    assert list(BagOfWords.fit(TEXTS, min_count=2).vocab) == ["cat", "dog", "the"]
    assert list(BagOfWords.fit(TEXTS, max_words=2).vocab) == ["cat", "dog"]
    pairs = BagOfWords.fit(TEXTS, min_count=2, ngrams=2)
    assert list(pairs.vocab) == ["cat", "dog", "the", "the cat"]
    assert pairs.counts(["the cat the cat"]).to_dense().tolist() == [[2, 0, 2, 2]]


def test_tfidf_equals_the_formula() -> None:
    bag = BagOfWords.fit(TEXTS)
    common, rare = math.log(4 / 3) + 1, math.log(4 / 2) + 1
    assert bag.idf.tolist() == pytest.approx([common, common, common, rare, rare])
    norm = math.sqrt(common**2 * 2 + rare**2)
    rows = bag.tfidf(["the cat sat", "zebra"]).to_dense()
    assert rows[0].tolist() == pytest.approx([common / norm, 0, common / norm, 0, rare / norm])
    assert rows[1].tolist() == [0, 0, 0, 0, 0]


def test_texts_without_frequent_words_or_labels_are_refused() -> None:
    with pytest.raises(UserError, match="no word occurs in 9 of the 3 texts"):
        BagOfWords.fit(TEXTS, min_count=9)
    with pytest.raises(UserError, match="no word occurs in 1 of the 0 texts"):
        BagOfWords.fit([])
    with pytest.raises(UserError, match="a classifier needs two or more, found 1"):
        LinearClassifier.fit(TEXTS, ["x", "x", "x"], BagOfWords.fit(TEXTS))


def test_labels_that_are_not_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="label 2: 1 is not a string; give strings"):
        LinearClassifier.fit(TEXTS, ["x", 1, "y"], BagOfWords.fit(TEXTS))  # type: ignore[list-item]


def test_texts_can_be_any_iterable() -> None:
    bag = BagOfWords.fit(text for text in TEXTS)
    assert torch.equal(bag.idf, BagOfWords.fit(TEXTS).idf)
    model = LinearClassifier.fit(iter(TEXTS), iter(["x", "x", "y"]), bag)
    assert torch.equal(model.weight, LinearClassifier.fit(TEXTS, ["x", "x", "y"], bag).weight)


def test_classifier_minimizes_its_loss() -> None:
    torch.manual_seed(0)
    texts = [" ".join(f"w{n}" for n in torch.randint(12, (6,)).tolist()) for _ in range(60)]
    labels = [str(n) for n in torch.randint(3, (60,)).tolist()]
    model = LinearClassifier.fit(texts, labels, BagOfWords.fit(texts), penalty=0.5)
    weight, bias = model.weight.double().requires_grad_(), model.bias.double().requires_grad_()
    logits = model.bag.tfidf(texts).to_dense().double() @ weight + bias
    target = torch.tensor([model.labels.index(label) for label in labels])
    loss = torch.nn.functional.cross_entropy(logits, target, reduction="sum") + 0.25 * weight.square().sum()
    loss.backward()
    assert weight.grad.abs().max() < 1e-3
    assert bias.grad.abs().max() < 1e-3
    again = LinearClassifier.fit(texts, labels, model.bag, penalty=0.5)
    assert torch.equal(again.weight, model.weight)


def test_classifier_round_trips_through_its_folder(tmp_path: Path) -> None:
    labels = ["pet", "pet", "dog"]
    model = LinearClassifier.fit(TEXTS, labels, BagOfWords.fit(TEXTS, ngrams=2), penalty=0.01)
    assert model.predict(TEXTS) == labels
    assert model.probabilities(TEXTS).sum(1).tolist() == pytest.approx([1, 1, 1])
    model.save(tmp_path)
    loaded = LinearClassifier.load(tmp_path)
    assert torch.equal(loaded.probabilities(TEXTS), model.probabilities(TEXTS))
    assert loaded.predict(["zebra dog"]) == model.predict(["zebra dog"])
    tensors = {"weight": model.weight, "bias": model.bias, "weights": model.bag.idf}
    data = {"labels": model.labels, "ngrams": 2, "words": list(model.bag.vocab)}
    save_tensors(tmp_path / "classifier.safetensors", tensors)  # two files, as in earlier versions
    (tmp_path / "classifier.json").write_text(json.dumps(data), encoding="utf-8")
    assert torch.equal(LinearClassifier.load(tmp_path).probabilities(TEXTS), model.probabilities(TEXTS))
    for wrong in ({"labels": ["a"]}, {"labels": ["a", "a"]}, {"labels": 1}, {"ngrams": 3}, {"words": []}):
        save_tensors(tmp_path / "classifier.safetensors", tensors, data | wrong)
        with pytest.raises(UserError, match="do not belong together"):
            LinearClassifier.load(tmp_path)
    model.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["classifier.safetensors"]


def accuracy(model: LinearClassifier, rows: list[list[str]]) -> float:
    labels = model.predict([text for text, _ in rows])
    return sum(label == reference for label, (_, reference) in zip(labels, rows, strict=True)) / len(rows)


def test_sst2_accuracy() -> None:
    train, dev = (
        [line.rsplit("\t", 1) for line in read_lines(corpus(f"sst2/{part}.tsv.gz"))][1:] for part in ("train", "dev")
    )
    texts, labels = [text for text, _ in train[:20_000]], [label for _, label in train[:20_000]]
    assert accuracy(LinearClassifier.fit(texts, labels, BagOfWords.fit(texts, min_count=2, ngrams=2)), dev) > 0.85


def test_agnews_accuracy() -> None:
    rows = [line.rsplit("\t", 1) for line in read_lines(corpus("agnews/train_10k.tsv.gz"))]
    texts, labels = [text for text, _ in rows[:4000]], [label for _, label in rows[:4000]]
    assert accuracy(LinearClassifier.fit(texts, labels, BagOfWords.fit(texts, min_count=2)), rows[8000:]) > 0.83
