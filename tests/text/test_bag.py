"""Bags of words: counts and tf-idf by hand, a classifier at its minimum, real data."""

import math
from pathlib import Path

import pytest
import torch

from clearhead.errors import UserError
from clearhead.files import read_lines
from clearhead.text.bag import BagOfWords, LinearClassifier
from tests.corpora import corpus

TEXTS = ["the cat sat", "The cat, the dog!", "a dog"]


def test_counts_are_those_of_the_words() -> None:
    bag = BagOfWords.fit(TEXTS)
    assert list(bag.words) == ["cat", "dog", "the", "a", "sat"]  # in most texts first, then by the alphabet
    assert bag.counts(["the the cat zebra", "", "dog"]).to_dense().tolist() == [
        [1, 0, 2, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]
    ]  # fmt: skip
    assert list(BagOfWords.fit(TEXTS, min_count=2).words) == ["cat", "dog", "the"]
    assert list(BagOfWords.fit(TEXTS, max_words=2).words) == ["cat", "dog"]
    pairs = BagOfWords.fit(TEXTS, min_count=2, ngrams=2)
    assert list(pairs.words) == ["cat", "dog", "the", "the cat"]
    assert pairs.counts(["the cat the cat"]).to_dense().tolist() == [[2, 0, 2, 2]]


def test_tfidf_is_the_hand_computed_one() -> None:
    bag = BagOfWords.fit(TEXTS)
    common, rare = math.log(4 / 3) + 1, math.log(4 / 2) + 1
    assert bag.weights.tolist() == pytest.approx([common, common, common, rare, rare])
    length = math.sqrt(common**2 * 2 + rare**2)
    rows = bag.tfidf(["the cat sat", "zebra"]).to_dense()
    assert rows[0].tolist() == pytest.approx([common / length, 0, common / length, 0, rare / length])
    assert rows[1].tolist() == [0, 0, 0, 0, 0]


def test_nothing_to_count_is_refused() -> None:
    with pytest.raises(UserError, match="no word is in 9 of the 3 texts"):
        BagOfWords.fit(TEXTS, min_count=9)
    with pytest.raises(UserError, match="no word is in 1 of the 0 texts"):
        BagOfWords.fit([])
    with pytest.raises(UserError, match="two labels or more"):
        LinearClassifier.fit(TEXTS, ["x", "x", "x"], BagOfWords.fit(TEXTS))


def test_labels_that_are_no_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="label 2 is 1, no text; give texts"):
        LinearClassifier.fit(TEXTS, ["x", 1, "y"], BagOfWords.fit(TEXTS))  # type: ignore[list-item]


def test_texts_may_come_from_any_iterable() -> None:
    bag = BagOfWords.fit(text for text in TEXTS)
    assert torch.equal(bag.weights, BagOfWords.fit(TEXTS).weights)
    model = LinearClassifier.fit(iter(TEXTS), iter(["x", "x", "y"]), bag)
    assert torch.equal(model.weight, LinearClassifier.fit(TEXTS, ["x", "x", "y"], bag).weight)


def test_classifier_stands_at_the_minimum_of_its_loss() -> None:
    torch.manual_seed(0)
    texts = [" ".join(f"w{n}" for n in torch.randint(12, (6,)).tolist()) for _ in range(60)]
    labels = [str(n) for n in torch.randint(3, (60,)).tolist()]
    model = LinearClassifier.fit(texts, labels, BagOfWords.fit(texts), penalty=0.5)
    weight, bias = model.weight.double().requires_grad_(), model.bias.double().requires_grad_()
    scores = model.bag.tfidf(texts).to_dense().double() @ weight + bias
    target = torch.tensor([model.labels.index(label) for label in labels])
    loss = torch.nn.functional.cross_entropy(scores, target, reduction="sum") + 0.25 * weight.square().sum()
    loss.backward()
    assert weight.grad.abs().max() < 1e-3
    assert bias.grad.abs().max() < 1e-3
    again = LinearClassifier.fit(texts, labels, model.bag, penalty=0.5)
    assert torch.equal(again.weight, model.weight)


def test_classifier_comes_back_from_its_folder(tmp_path: Path) -> None:
    labels = ["pet", "pet", "dog"]
    model = LinearClassifier.fit(TEXTS, labels, BagOfWords.fit(TEXTS, ngrams=2), penalty=0.01)
    assert model.predict(TEXTS) == labels
    assert model.probabilities(TEXTS).sum(1).tolist() == pytest.approx([1, 1, 1])
    model.save(tmp_path)
    back = LinearClassifier.load(tmp_path)
    assert torch.equal(back.probabilities(TEXTS), model.probabilities(TEXTS))
    assert back.predict(["zebra dog"]) == model.predict(["zebra dog"])
    (tmp_path / "classifier.json").write_text('{"labels": ["a"], "ngrams": 1, "words": []}', encoding="utf-8")
    with pytest.raises(UserError, match="do not belong together"):
        LinearClassifier.load(tmp_path)


def accuracy(model: LinearClassifier, rows: list[list[str]]) -> float:
    found = model.predict([text for text, _ in rows])
    return sum(label == right for label, (_, right) in zip(found, rows, strict=True)) / len(rows)


def test_reviews_are_told_apart() -> None:
    train, dev = (
        [line.rsplit("\t", 1) for line in read_lines(corpus(f"sst2/{part}.tsv.gz"))][1:] for part in ("train", "dev")
    )
    texts, labels = [text for text, _ in train[:20_000]], [label for _, label in train[:20_000]]
    assert accuracy(LinearClassifier.fit(texts, labels, BagOfWords.fit(texts, min_count=2, ngrams=2)), dev) > 0.85


def test_news_are_told_apart() -> None:
    rows = [line.rsplit("\t", 1) for line in read_lines(corpus("agnews/train_10k.tsv.gz"))]
    texts, labels = [text for text, _ in rows[:4000]], [label for _, label in rows[:4000]]
    assert accuracy(LinearClassifier.fit(texts, labels, BagOfWords.fit(texts, min_count=2)), rows[8000:]) > 0.83
