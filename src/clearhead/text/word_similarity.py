"""Evaluate word vectors: Spearman correlation on word pairs, accuracy on analogies."""

from dataclasses import dataclass
from pathlib import Path

import torch

from clearhead.errors import UserError
from clearhead.files import read_lines
from clearhead.text.correlation import spearman
from clearhead.text.word_vectors import WordVectors


@dataclass(frozen=True)
class PairScore:
    """Correlation on a file of word pairs; pairs with an unknown word are skipped and counted."""

    name: str
    spearman: float
    pairs: int
    unknown: int


@dataclass(frozen=True)
class AnalogyScore:
    """Accuracy on a section of analogies; questions with an unknown word are skipped and counted."""

    name: str
    correct: int
    total: int
    unknown: int

    @property
    def accuracy(self) -> float:
        """Fraction of correct answers; 0 without questions."""
        return self.correct / self.total if self.total else 0.0


def score_pairs(vectors: WordVectors, path: Path) -> PairScore:
    """Spearman correlation of cosine and human score over lines `word TAB word TAB score`; # starts a comment."""
    human_scores, cosines, unknown = [], [], 0
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            first, second, score = line.lower().split("\t")[:3]
            human_score = float(score)
        except ValueError:
            raise UserError(f"{path}, line {number}: expected two words and a score; separate them by tabs") from None
        if first in vectors and second in vectors:
            human_scores.append(human_score)
            cosines.append(vectors.similarity(first, second))
        else:
            unknown += 1
    if len(cosines) < 2:
        raise UserError(
            f"{path}: {len(cosines)} of {len(cosines) + unknown} pairs have vectors for both words; at least 2 are "
            "needed, use another file or more text"
        )
    return PairScore(path.name, spearman(human_scores, cosines), len(cosines), unknown)


def score_analogies(vectors: WordVectors, path: Path) -> list[AnalogyScore]:
    """Accuracy by section over lines `Athens Greece Oslo Norway`; a line `: name` starts a section."""
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
            raise UserError(f"{path}, line {number}: expected four words; or start a section with `: name`")
        sections.setdefault(name, [])
        unknown.setdefault(name, 0)
        if all(word in vectors for word in words):
            sections[name].append([vectors.word_ids[word] for word in words])
        else:
            unknown[name] += 1
    if not any(sections.values()):
        raise UserError(f"{path}: no analogy has vectors for all four words; use another file or more text")
    return [
        AnalogyScore(name, _count_correct(vectors, questions), len(questions), unknown[name])
        for name, questions in sections.items()
    ]


def _count_correct(vectors: WordVectors, questions: list[list[int]]) -> int:
    correct = 0
    for batch in torch.tensor(questions, dtype=torch.long).view(-1, 4).split(512):
        _, nearest = vectors.nearest(vectors.analogy_queries(batch[:, :3]), batch[:, :3], 1)
        correct += int((nearest[:, 0] == batch[:, 3]).sum())
    return correct
