"""Word vectors: nearest neighbors, analogies, and reading and writing files."""

from __future__ import annotations

import difflib
from array import array
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
from clearhead.text.tensors import is_list_of_strings, load_with_json, save_tensors

FILE, EARLIER_FILE = "vectors.safetensors", "vocabulary.json"  # which had the words in earlier versions


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words, most frequent first, and their vectors (V, D).   V vocabulary · D dim"""

    words: Sequence[str]
    vectors: Tensor

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or len(self.words) != len(self.vectors):
            raise ValueError(f"vectors: expected shape ({len(self.words)}, dim), found {tuple(self.vectors.shape)}")

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self.word_ids

    def __getitem__(self, word: str) -> Tensor:
        """Return the vector of a word (D,)."""
        return self.vectors[self.id(word)]

    @cached_property
    def word_ids(self) -> dict[str, int]:
        """The row of each word."""
        return {word: row for row, word in enumerate(self.words)}

    @cached_property
    def unit_vectors(self) -> Tensor:
        """The vectors scaled to unit length (V, D)."""
        return torch.nn.functional.normalize(self.vectors, dim=1)

    def id(self, word: str) -> int:
        """Return the row of a word, or of the lowercased word."""
        for spelling in (word, word.lower()):
            if spelling in self.word_ids:
                return self.word_ids[spelling]
        same_initial = [known for known in self.words if known[:1] == word[:1].lower()]
        near = difflib.get_close_matches(word.lower(), same_initial, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else "; it may be too rare or spelled differently"
        raise UserError(f"{word!r} is not in the vocabulary of {len(self):,} words{hint}")

    def similarity(self, first: str, second: str) -> float:
        """Cosine similarity of two words."""
        return float(self.unit_vectors[self.id(first)] @ self.unit_vectors[self.id(second)])

    def neighbors(self, word: str, count: int = 10) -> list[tuple[str, float]]:
        """Return the words with the largest cosine, without the word itself."""
        row = torch.tensor([[self.id(word)]])
        return self._named_nearest(self.unit_vectors[row[:, 0]], row, count)

    def analogy(self, first: str, second: str, third: str, count: int = 10) -> list[tuple[str, float]]:
        """Solve `first` is to `second` as `third` is to …; the three words are excluded."""
        rows = torch.tensor([[self.id(word) for word in (first, second, third)]])
        return self._named_nearest(self.analogy_queries(rows), rows, count)

    def analogy_queries(self, rows: Tensor) -> Tensor:
        """Query vectors second - first + third (Q, D) of analogies given as rows (Q, 3)."""
        first, second, third = self.unit_vectors[rows].unbind(1)
        return second - first + third

    def nearest(self, queries: Tensor, exclude: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and rows (Q, count) of the words nearest to queries (Q, D), without the rows in `exclude` (Q, n)."""
        cosines = torch.nn.functional.normalize(queries, dim=1) @ self.unit_vectors.T
        cosines.scatter_(1, exclude, -torch.inf)
        available = len(self) - len(set(exclude[0].tolist())) if len(exclude) == 1 else len(self)
        return cosines.topk(max(0, min(count, available)), dim=1)

    def _named_nearest(self, queries: Tensor, exclude: Tensor, count: int) -> list[tuple[str, float]]:
        cosines, rows = self.nearest(queries, exclude, count)
        return [(self.words[row], cosine) for cosine, row in zip(cosines[0].tolist(), rows[0].tolist(), strict=True)]

    def save(self, folder: Path) -> None:
        """Write vectors.safetensors to a folder, with the words."""
        if not bool(self.vectors.isfinite().all()):
            raise UserError("training diverged: a vector is not finite; lower --lr")
        save_tensors(folder / FILE, {"vectors": self.vectors}, {"words": list(self.words)})
        (folder / EARLIER_FILE).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> WordVectors:
        """Load a folder written by `save`, or a file in the word2vec text format, plain or gzip."""
        if path.is_file():
            return cls.load_text(path)
        if not path.is_dir():
            raise UserError(
                f"{path} does not exist; give a folder written by `clearhead word2vec train`, or a text file"
            )
        tensors, data = load_with_json(path / FILE, {"vectors": 2}, path / EARLIER_FILE, ("words",))
        if not is_list_of_strings(data["words"]):
            raise UserError(f"{path}: words is not a list of strings; train or download it again")
        return cls._validated(data["words"], tensors["vectors"], str(path))

    def save_text(self, path: Path) -> None:
        """Write the word2vec text format: a line `words dim`, then one word with its values per line."""
        for word in self.words:
            if not word or any(character.isspace() for character in word):
                raise UserError(f"{word!r} contains a space, which the text format does not allow; remove it")
        row_format = " ".join(["%.9g"] * self.vectors.shape[1])  # nine digits are exact for fp32
        rows = (
            f"{word} {row_format % tuple(row.tolist())}\n" for word, row in zip(self.words, self.vectors, strict=True)
        )
        write_text(path, "".join(chain([f"{len(self)} {self.vectors.shape[1]}\n"], rows)))

    @classmethod
    def load_text(cls, path: Path) -> WordVectors:
        """Read the word2vec text format, plain or gzip."""
        lines = read_lines(path)
        header = next(lines, "").split()
        if len(header) != 2 or not all(part.isdecimal() and len(part) < 10 for part in header):
            raise UserError(f"{path}, line 1: expected the number of words and the dim; write it like `28634 100`")
        count, dim = map(int, header)
        words: list[str] = []
        values = array("f")  # four bytes each: an array per row would take 100 more
        for number, line in enumerate(lines, start=2):
            if not line.strip() and len(words) == count:
                continue
            if len(words) == count:
                raise UserError(f"{path}, line {number}: the header declares {count:,} words, but there are more")
            word, *parts = line.rstrip().split(" ")
            try:
                with np.errstate(over="ignore"):  # infinite, which is refused
                    row = np.array(parts, dtype=np.float32)
            except ValueError:
                row = np.empty(0, dtype=np.float32)
            if len(row) != dim or not word:
                raise UserError(f"{path}, line {number}: expected a word and {dim} numbers; download it again")
            words.append(word)
            values.frombytes(row.tobytes())
        if len(words) != count or not count or not dim:
            raise UserError(f"{path}: the header declares {count:,} words, found {len(words):,}; download it again")
        return cls._validated(words, torch.frombuffer(values, dtype=torch.float32).reshape(count, dim), str(path))

    @classmethod
    def _validated(cls, words: list[str], vectors: Tensor, where: str) -> WordVectors:
        if len(words) != len(vectors) or not len(words):
            raise UserError(
                f"{where}: {len(words):,} words, but {len(vectors):,} vectors do not belong together; train again"
            )
        if len(set(words)) != len(words):
            raise UserError(f"{where}: duplicate word; keep one vector per word")
        if not bool(vectors.isfinite().all()):
            raise UserError(f"{where}: a vector is not finite; train again with a lower learning rate")
        return cls(words, vectors)
