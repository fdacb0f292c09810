"""Bags of words: counts and tf-idf as sparse matrices, and a linear classifier on them, the baseline to beat."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from clearhead.errors import UserError
from clearhead.files import write_text
from clearhead.text.corpus import words_of
from clearhead.text.tensors import load_json, load_tensors, save_tensors


@dataclass(frozen=True, eq=False)
class BagOfWords:
    """The words (and pairs of words, joined by a space) that are counted, and how telling each is."""

    words: Sequence[str]
    weights: Tensor  # (words,) inverse document frequency: ln((1 + texts) / (1 + texts with the word)) + 1
    ngrams: int = 1  # 2: pairs of neighboring words count too

    @classmethod
    def fit(cls, texts: Iterable[str], min_count: int = 1, max_words: int = 1_000_000, ngrams: int = 1) -> BagOfWords:
        """The words in at least `min_count` texts, the `max_words` that are in most."""
        if ngrams not in (1, 2):
            raise ValueError(f"ngrams is 1 (words) or 2 (words and pairs), not {ngrams}")
        texts = list(texts)
        found: Counter[str] = Counter()
        for text in texts:
            found.update(set(_terms(text, ngrams)))
        chosen = [(word, count) for word, count in found.items() if count >= min_count]
        if not chosen:
            most = max(found.values(), default=0)
            raise UserError(f"no word is in {min_count} of the {len(texts)} texts (at most: {most}); give more text")
        chosen.sort(key=lambda pair: (-pair[1], pair[0]))
        texts_with = torch.tensor([count for _, count in chosen[:max_words]], dtype=torch.float64)
        weights = ((1 + len(texts)) / (1 + texts_with)).log() + 1
        return cls([word for word, _ in chosen[:max_words]], weights.float(), ngrams)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The column of each word."""
        return {word: number for number, word in enumerate(self.words)}

    def counts(self, texts: Sequence[str]) -> Tensor:
        """How often each word occurs in each text: sparse CSR (texts, words)."""
        starts, columns, values = [0], [], []
        for text in texts:
            found = Counter(self.numbers[term] for term in _terms(text, self.ngrams) if term in self.numbers)
            for column in sorted(found):
                columns.append(column)
                values.append(found[column])
            starts.append(len(columns))
        return _csr(torch.tensor(starts), torch.tensor(columns, dtype=torch.long), torch.tensor(values).float(),
                    (len(texts), len(self.words)))  # fmt: skip

    def tfidf(self, texts: Sequence[str]) -> Tensor:
        """Counts times weights, each text at length 1 (or 0, without a known word): sparse CSR (texts, words)."""
        counts = self.counts(texts)
        starts, columns = counts.crow_indices(), counts.col_indices()
        values = counts.values() * self.weights[columns]
        row = torch.repeat_interleave(torch.arange(len(texts)), starts.diff())
        length = torch.zeros(len(texts)).index_add_(0, row, values**2).sqrt()
        return _csr(starts, columns, values / length[row], (len(texts), len(self.words)))


@dataclass(frozen=True, eq=False)
class LinearClassifier:
    """Multinomial logistic regression on tf-idf."""

    bag: BagOfWords
    labels: Sequence[str]
    weight: Tensor  # (words, labels)
    bias: Tensor  # (labels,)

    @classmethod
    def fit(
        cls, texts: Iterable[str], labels: Iterable[str], bag: BagOfWords, penalty: float = 1.0
    ) -> LinearClassifier:
        """Minimise the summed cross entropy plus penalty / 2 · |weight|², by L-BFGS; nothing in it is random."""
        texts, labels = list(texts), list(labels)
        if len(texts) != len(labels):
            raise ValueError(f"{len(texts)} texts, but {len(labels)} labels")
        for place, label in enumerate(labels, start=1):
            if not isinstance(label, str):
                raise ValueError(f"label {place} is {label!r:.40}, no text; give texts, like str(label)")
        names = sorted(set(labels))
        if len(names) < 2:
            raise UserError(f"a classifier needs two labels or more to choose from, found {len(names)}")
        number = {name: place for place, name in enumerate(names)}
        target = torch.tensor([number[label] for label in labels])
        rows = bag.tfidf(texts).double()
        columns = _transposed(rows)
        weight, bias = torch.zeros(len(bag.words), len(names)).double(), torch.zeros(len(names)).double()
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=500, tolerance_grad=1e-6, tolerance_change=1e-10, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            scores = (rows @ weight + bias).log_softmax(1)
            error = scores.exp()
            error[torch.arange(len(target)), target] -= 1
            weight.grad = (columns @ error + penalty * weight) / len(target)
            bias.grad = error.sum(0) / len(target)
            total = penalty / 2 * weight.square().sum() - scores.gather(1, target[:, None]).sum()
            return total / len(target)

        optimizer.step(loss)
        return cls(bag, names, weight.float(), bias.float())

    def probabilities(self, texts: Sequence[str]) -> Tensor:
        """How likely each label is (texts, labels), in the order of `labels`."""
        return (self.bag.tfidf(texts) @ self.weight + self.bias).softmax(1)

    def predict(self, texts: Sequence[str]) -> list[str]:
        """The most likely label of each text."""
        return [self.labels[number] for number in self.probabilities(texts).argmax(1).tolist()]

    def save(self, folder: Path) -> None:
        """Write classifier.safetensors and classifier.json into a folder."""
        tensors = {"weight": self.weight, "bias": self.bias, "weights": self.bag.weights}
        save_tensors(folder / "classifier.safetensors", tensors)
        data = {"labels": list(self.labels), "ngrams": self.bag.ngrams, "words": list(self.bag.words)}
        write_text(folder / "classifier.json", json.dumps(data, ensure_ascii=False))

    @classmethod
    def load(cls, folder: Path) -> LinearClassifier:
        """Read what `save` wrote."""
        tensors = load_tensors(folder / "classifier.safetensors", {"weight": 2, "bias": 1, "weights": 1})
        data = load_json(folder / "classifier.json", ("labels", "ngrams", "words"))
        words, labels, shape = data["words"], data["labels"], tuple(tensors["weight"].shape)
        fits = (
            data["ngrams"] in (1, 2)
            and all(isinstance(each, list) and all(isinstance(name, str) for name in each) for each in (words, labels))
            and shape == (len(words), len(labels)) == (len(tensors["weights"]), len(tensors["bias"]))
        )
        if not fits:
            raise UserError(f"{folder}: classifier.json and classifier.safetensors do not belong together")
        bag = BagOfWords(words, tensors["weights"], data["ngrams"])
        return cls(bag, labels, tensors["weight"], tensors["bias"])


def _terms(text: str, ngrams: int) -> Iterator[str]:
    words = words_of(text)
    yield from words
    if ngrams == 2:
        for pair in pairwise(words):
            yield " ".join(pair)


def _csr(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():  # torch calls its sparse tensors beta, once a process
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


def _transposed(matrix: Tensor) -> Tensor:
    """A sparse CSR matrix with rows and columns exchanged."""
    row = torch.repeat_interleave(torch.arange(matrix.shape[0]), matrix.crow_indices().diff())
    order = matrix.col_indices().argsort(stable=True)
    starts = torch.zeros(matrix.shape[1] + 1, dtype=torch.long)
    starts[1:] = matrix.col_indices().bincount(minlength=matrix.shape[1]).cumsum(0)
    return _csr(starts, row[order], matrix.values()[order], (matrix.shape[1], matrix.shape[0]))
