"""Words with a vector each: neighbors, analogies, files of ours and the text format that other tools read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import UserError
from clearhead.files import read_lines, write_text
from clearhead.text.tensors import load_json, load_tensors, save_tensors


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words, the most frequent first, and their vectors (words, width)."""

    words: Sequence[str]
    vectors: Tensor

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or len(self.words) != len(self.vectors):
            raise ValueError(f"{len(self.words)} words need as many rows, found {tuple(self.vectors.shape)}")

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self.numbers

    def __getitem__(self, word: str) -> Tensor:
        """The vector of a word (width,)."""
        return self.vectors[self.number(word)]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The row of each word."""
        return {word: number for number, word in enumerate(self.words)}

    @cached_property
    def directions(self) -> Tensor:
        """The vectors at length 1 (words, width), so that a product of two is the cosine."""
        return torch.nn.functional.normalize(self.vectors, dim=1)

    def number(self, word: str) -> int:
        """The row of a word as it is written, or else in lower case."""
        for spelling in (word, word.lower()):
            if spelling in self.numbers:
                return self.numbers[spelling]
        near = difflib.get_close_matches(
            word.lower(), [known for known in self.words if known[:1] == word[:1].lower()], n=3
        )
        hint = f"; near it: {', '.join(near)}" if near else "; it may be too rare, or written in another way"
        raise UserError(f"{word!r} is not among the {len(self):,} words{hint}")

    def similarity(self, first: str, second: str) -> float:
        """The cosine of two words, from -1 to 1."""
        return float(self.directions[self.number(first)] @ self.directions[self.number(second)])

    def neighbors(self, word: str, count: int = 10) -> list[tuple[str, float]]:
        """The words with the largest cosine, the nearest first, without the word itself."""
        number = torch.tensor([[self.number(word)]])
        return self._named(self.directions[number[:, 0]], number, count)

    def analogy(self, first: str, second: str, third: str, count: int = 10) -> list[tuple[str, float]]:
        """`first` is to `second` as `third` is to …; the three themselves are never an answer."""
        question = torch.tensor([[self.number(word) for word in (first, second, third)]])
        return self._named(self.questions(question), question, count)

    def questions(self, rows: Tensor) -> Tensor:
        """Where the answers of analogies lie (questions, width): second - first + third, of rows (questions, 3)."""
        first, second, third = self.directions[rows].unbind(1)
        return second - first + third

    def nearest(self, points: Tensor, exclude: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and rows (points, count) of the words nearest to points (points, width), some rows each left out."""
        cosines = torch.nn.functional.normalize(points, dim=1) @ self.directions.T
        cosines.scatter_(1, exclude, -torch.inf)
        left = len(self) - len(set(exclude[0].tolist())) if len(exclude) == 1 else len(self)
        return cosines.topk(max(0, min(count, left)), dim=1)

    def _named(self, points: Tensor, exclude: Tensor, count: int) -> list[tuple[str, float]]:
        cosines, rows = self.nearest(points, exclude, count)
        return [(self.words[row], cosine) for cosine, row in zip(cosines[0].tolist(), rows[0].tolist(), strict=True)]

    def save(self, folder: Path) -> None:
        """Write vectors.safetensors and vocabulary.json into a folder."""
        if not bool(self.vectors.isfinite().all()):
            raise UserError("the training diverged (a vector is not finite); lower --learning-rate")
        save_tensors(folder / "vectors.safetensors", {"vectors": self.vectors})
        write_text(folder / "vocabulary.json", json.dumps({"words": list(self.words)}, ensure_ascii=False))

    @classmethod
    def load(cls, path: Path) -> WordVectors:
        """Read a folder of ours, or a file in the common text format, plain or gzip."""
        if path.is_file():
            return cls.load_text(path)
        if not path.is_dir():
            raise UserError(
                f"{path} does not exist; give a folder written by `clearhead word2vec train`, or a text file"
            )
        vectors = load_tensors(path / "vectors.safetensors", {"vectors": 2})["vectors"].float()
        words = load_json(path / "vocabulary.json", ("words",))["words"]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UserError(f"{path / 'vocabulary.json'}: words is no list of words; fetch it again")
        return cls._checked(words, vectors, str(path))

    def save_text(self, path: Path) -> None:
        """Write the common text format: a line `words width`, then a line a word, its numbers behind it."""
        for word in self.words:
            if not word or any(character.isspace() for character in word):
                raise UserError(f"{word!r} has a space in it, which the text format cannot hold; leave it out")
        numbers = " ".join(["%.9g"] * self.vectors.shape[1])  # nine digits bring every float32 back exactly
        rows = (f"{word} {numbers % tuple(row.tolist())}\n" for word, row in zip(self.words, self.vectors, strict=True))
        write_text(path, "".join(chain([f"{len(self)} {self.vectors.shape[1]}\n"], rows)))

    @classmethod
    def load_text(cls, path: Path) -> WordVectors:
        """Read the common text format, plain or gzip."""
        lines = read_lines(path)
        header = next(lines, "").split()
        if len(header) != 2 or not all(part.isdecimal() and len(part) < 10 for part in header):
            raise UserError(f"{path}, line 1: expected the number of words and the width, like `28634 100`")
        count, width = map(int, header)
        words: list[str] = []
        rows: list[np.ndarray] = []
        for number, line in enumerate(lines, start=2):
            if not line.strip() and len(words) == count:
                continue
            word, *parts = line.rstrip().split(" ")
            try:
                row = np.array(parts, dtype=np.float32)
            except ValueError:
                row = np.empty(0, dtype=np.float32)
            if len(row) != width or not word:
                raise UserError(f"{path}, line {number}: expected a word and {width} numbers")
            words.append(word)
            rows.append(row)
        if len(words) != count or not count or not width:
            raise UserError(f"{path}: the first line promises {count:,} words, found {len(words):,}; fetch it again")
        return cls._checked(words, torch.from_numpy(np.stack(rows)), str(path))

    @classmethod
    def _checked(cls, words: list[str], vectors: Tensor, where: str) -> WordVectors:
        if len(words) != len(vectors) or not len(words):
            raise UserError(
                f"{where}: {len(words):,} words, but {len(vectors):,} vectors; the files do not belong together"
            )
        if len(set(words)) != len(words):
            raise UserError(f"{where}: a word stands twice; each word has one vector")
        if not bool(vectors.isfinite().all()):
            raise UserError(
                f"{where}: a vector has a number that is not finite; train again with a smaller learning rate"
            )
        return cls(words, vectors)
