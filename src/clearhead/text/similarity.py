"""How well word vectors agree with people: Spearman's correlation on word pairs, and the share of analogies solved."""

from dataclasses import dataclass
from pathlib import Path

import torch

from clearhead.errors import UserError
from clearhead.files import read_lines
from clearhead.text.correlation import spearman
from clearhead.text.vectors import WordVectors


@dataclass(frozen=True)
class PairScore:
    """Agreement on a file of pairs; those with an unknown word are left out and counted."""

    name: str
    spearman: float
    pairs: int
    unknown: int


@dataclass(frozen=True)
class AnalogyScore:
    """A section of a file of analogies; those with an unknown word are left out and counted."""

    name: str
    right: int
    asked: int
    unknown: int

    @property
    def accuracy(self) -> float:
        """The share of those asked that were answered rightly; 0 where none could be asked."""
        return self.right / self.asked if self.asked else 0.0


def score_pairs(vectors: WordVectors, path: Path) -> PairScore:
    """Spearman's correlation of cosine and human score over lines `word TAB word TAB score`; # begins a comment."""
    people, cosines, unknown = [], [], 0
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            first, second, score = line.lower().split("\t")[:3]
            human = float(score)
        except ValueError:
            raise UserError(f"{path}, line {number}: expected two words and a score, with tabs between") from None
        if first in vectors and second in vectors:
            people.append(human)
            cosines.append(vectors.similarity(first, second))
        else:
            unknown += 1
    if len(people) < 2:
        raise UserError(
            f"{path}: {len(people)} of {len(people) + unknown} pairs have both words among the vectors; need 2"
        )
    return PairScore(path.name, spearman(people, cosines), len(people), unknown)


def score_analogies(vectors: WordVectors, path: Path) -> list[AnalogyScore]:
    """Accuracy by section over lines `Athens Greece Oslo Norway`; a line `: name` begins a section."""
    sections: dict[str, list[list[int]]] = {}
    unknown: dict[str, int] = {}
    name = ""
    for number, line in enumerate(read_lines(path), start=1):
        if line.startswith(":"):
            name = line[1:].strip()
            continue
        words = line.lower().split()
        if not words:
            continue
        if len(words) != 4:
            raise UserError(f"{path}, line {number}: expected four words, or `: name` of a section")
        sections.setdefault(name, [])
        unknown.setdefault(name, 0)
        if all(word in vectors for word in words):
            sections[name].append([vectors.numbers[word] for word in words])
        else:
            unknown[name] += 1
    if not any(sections.values()):
        raise UserError(f"{path}: no analogy has all its words among the vectors; use more text or another file")
    return [AnalogyScore(name, _solved(vectors, rows), len(rows), unknown[name]) for name, rows in sections.items()]


def _solved(vectors: WordVectors, rows: list[list[int]]) -> int:
    right = 0
    for part in torch.tensor(rows, dtype=torch.long).view(-1, 4).split(512):
        _, nearest = vectors.nearest(vectors.questions(part[:, :3]), part[:, :3], 1)
        right += int((nearest[:, 0] == part[:, 3]).sum())
    return right
