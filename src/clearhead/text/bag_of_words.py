"""Bag-of-words baseline: counts and tf-idf as sparse matrices, and a linear classifier on them."""

from __future__ import annotations

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
from clearhead.text.corpus import lowercase_words
from clearhead.text.tensors import is_list_of_strings, load_with_json, save_tensors

FILE, EARLIER_FILE = "classifier.safetensors", "classifier.json"  # which had words and labels in earlier versions


@dataclass(frozen=True, eq=False)
class BagOfWords:
    """A vocabulary of words (and bigrams, joined by a space) with inverse document frequencies.

    N texts · V vocabulary · L labels
    """

    vocab: Sequence[str]
    idf: Tensor  # (V,) ln((1 + N) / (1 + texts with the word)) + 1
    ngrams: int = 1  # 2: also bigrams

    @classmethod
    def fit(cls, texts: Iterable[str], min_count: int = 1, max_words: int = 1_000_000, ngrams: int = 1) -> BagOfWords:
        """Build the vocabulary: the `max_words` most common words that occur in at least `min_count` texts."""
        if ngrams not in (1, 2):
            raise ValueError(f"ngrams: {ngrams}; use 1 (words) or 2 (words and bigrams)")
        texts = list(texts)
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(set(_terms(text, ngrams)))
        frequent = [(word, count) for word, count in counts.items() if count >= min_count]
        if not frequent:
            highest = max(counts.values(), default=0)
            raise UserError(
                f"no word occurs in {min_count} of the {len(texts)} texts (highest: {highest}); give more text"
            )
        frequent.sort(key=lambda pair: (-pair[1], pair[0]))
        document_counts = torch.tensor([count for _, count in frequent[:max_words]], dtype=torch.float64)
        idf = ((1 + len(texts)) / (1 + document_counts)).log() + 1
        return cls([word for word, _ in frequent[:max_words]], idf.float(), ngrams)

    @cached_property
    def word_ids(self) -> dict[str, int]:
        """The column of each word."""
        return {word: column for column, word in enumerate(self.vocab)}

    def counts(self, texts: Sequence[str]) -> Tensor:
        """Count the words of each text: sparse CSR (N, V)."""
        starts, columns, values = [0], [], []
        for text in texts:
            row = Counter(self.word_ids[term] for term in _terms(text, self.ngrams) if term in self.word_ids)
            for column in sorted(row):
                columns.append(column)
                values.append(row[column])
            starts.append(len(columns))
        return _csr(torch.tensor(starts), torch.tensor(columns, dtype=torch.long), torch.tensor(values).float(),
                    (len(texts), len(self.vocab)))  # fmt: skip

    def tfidf(self, texts: Sequence[str]) -> Tensor:
        """Counts times idf, scaled to unit length (0 without known words): sparse CSR (N, V)."""
        counts = self.counts(texts)
        starts, columns = counts.crow_indices(), counts.col_indices()
        values = counts.values() * self.idf[columns]
        row = torch.repeat_interleave(torch.arange(len(texts)), starts.diff())
        norm = torch.zeros(len(texts)).index_add_(0, row, values**2).sqrt()
        return _csr(starts, columns, values / norm[row], (len(texts), len(self.vocab)))


@dataclass(frozen=True, eq=False)
class LinearClassifier:
    """Multinomial logistic regression on tf-idf."""

    bag: BagOfWords
    labels: Sequence[str]
    weight: Tensor  # (V, L)
    bias: Tensor  # (L,)

    @classmethod
    def fit(
        cls, texts: Iterable[str], labels: Iterable[str], bag: BagOfWords, penalty: float = 1.0
    ) -> LinearClassifier:
        """Minimize the summed cross-entropy plus penalty / 2 · |weight|² with L-BFGS; deterministic."""
        texts, labels = list(texts), list(labels)
        if len(texts) != len(labels):
            raise ValueError(f"{len(texts)} texts, but {len(labels)} labels")
        for number, label in enumerate(labels, start=1):
            if not isinstance(label, str):
                raise ValueError(f"label {number}: {label!r:.40} is not a string; give strings, like str(label)")
        names = sorted(set(labels))
        if len(names) < 2:
            raise UserError(f"labels: a classifier needs two or more, found {len(names)}; add texts with other labels")
        label_ids = {name: number for number, name in enumerate(names)}
        targets = torch.tensor([label_ids[label] for label in labels])
        rows = bag.tfidf(texts).double()
        columns = _transpose(rows)
        weight, bias = torch.zeros(len(bag.vocab), len(names)).double(), torch.zeros(len(names)).double()
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=500, tolerance_grad=1e-6, tolerance_change=1e-10, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            logprobs = (rows @ weight + bias).log_softmax(1)
            error = logprobs.exp()
            error[torch.arange(len(targets)), targets] -= 1
            weight.grad = (columns @ error + penalty * weight) / len(targets)
            bias.grad = error.sum(0) / len(targets)
            total = penalty / 2 * weight.square().sum() - logprobs.gather(1, targets[:, None]).sum()
            return total / len(targets)

        optimizer.step(loss)
        return cls(bag, names, weight.float(), bias.float())

    def probabilities(self, texts: Sequence[str]) -> Tensor:
        """Label probabilities (N, L), in the order of `labels`."""
        return (self.bag.tfidf(texts) @ self.weight + self.bias).softmax(1)

    def predict(self, texts: Sequence[str]) -> list[str]:
        """Return the most likely label of each text."""
        return [self.labels[number] for number in self.probabilities(texts).argmax(1).tolist()]

    def save(self, folder: Path) -> None:
        """Write classifier.safetensors to a folder, with words and labels."""
        tensors = {"weight": self.weight, "bias": self.bias, "weights": self.bag.idf}
        data = {"labels": list(self.labels), "ngrams": self.bag.ngrams, "words": list(self.bag.vocab)}
        save_tensors(folder / FILE, tensors, data)
        (folder / EARLIER_FILE).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path) -> LinearClassifier:
        """Load a folder written by `save`."""
        ranks, keys = {"weight": 2, "bias": 1, "weights": 1}, ("labels", "ngrams", "words")
        tensors, data = load_with_json(folder / FILE, ranks, folder / EARLIER_FILE, keys)
        vocab, labels, shape = data["words"], data["labels"], tuple(tensors["weight"].shape)
        consistent = (
            data["ngrams"] in (1, 2)
            and all(is_list_of_strings(names) and names and len(names) == len({*names}) for names in (vocab, labels))
            and shape == (len(vocab), len(labels)) == (len(tensors["weights"]), len(tensors["bias"]))
        )
        if not consistent:
            raise UserError(f"{folder}: words, labels and weights do not belong together; save the classifier again")
        bag = BagOfWords(vocab, tensors["weights"], data["ngrams"])
        return cls(bag, labels, tensors["weight"], tensors["bias"])


def _terms(text: str, ngrams: int) -> Iterator[str]:
    words = lowercase_words(text)
    yield from words
    if ngrams == 2:
        for pair in pairwise(words):
            yield " ".join(pair)


def _csr(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():  # torch warns once per process
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


def _transpose(matrix: Tensor) -> Tensor:
    """Transpose a sparse CSR matrix."""
    row = torch.repeat_interleave(torch.arange(matrix.shape[0]), matrix.crow_indices().diff())
    order = matrix.col_indices().argsort(stable=True)
    starts = torch.zeros(matrix.shape[1] + 1, dtype=torch.long)
    starts[1:] = matrix.col_indices().bincount(minlength=matrix.shape[1]).cumsum(0)
    return _csr(starts, row[order], matrix.values()[order], (matrix.shape[1], matrix.shape[0]))
