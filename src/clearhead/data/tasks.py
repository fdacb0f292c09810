"""What is learned from a record, and what a batch of it looks like: translation and language modeling.

A task turns records into rows of a store (once), and samples of the store into batches (every epoch).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.config.data import DataConfig
from clearhead.data.batch import Batch, arrange
from clearhead.data.formats import TEXT, TRANSLATION, Place, Record
from clearhead.data.random import hash_ints
from clearhead.data.store import Row, Store, ranges
from clearhead.model import Documents
from clearhead.ops.cross_entropy import IGNORED
from clearhead.text import Tokenizer
from clearhead.text.roles import Role

Samples = NDArray[np.int64]


class Task(ABC):
    """Records to rows, and samples to batches."""

    columns: ClassVar[tuple[str, ...]] = ()
    roles: ClassVar[tuple[Role, ...]]  # special tokens that a tokenizer trained for this task gets
    stream: ClassVar[bool] = False  # whether records are documents that may be cut anywhere
    share: tuple[float, float] = (0.0, 1.0)  # of such a stream, the part that belongs to this set
    uniform: ClassVar[bool] = False  # whether all samples have the same length, so that batches need no sorting

    def __init__(self, config: DataConfig, tokenizers: Sequence[Tokenizer], labels: Sequence[str] = ()):
        self.config, self.tokenizers, self.labels = config, tokenizers, tuple(labels)
        self.tokenizer = tokenizers[0]
        pads = [each.roles.get("pad", 0) for each in tokenizers]
        # What stands behind the shorter rows of a padded batch
        self.padding = {"source": pads[0], "target": pads[-1], "ids": pads[0], "first": pads[0], "second": pads[0]}
        self.padding["labels"] = IGNORED

    @classmethod
    def reads(cls, config: DataConfig) -> tuple[str, ...]:
        """The columns that a record of this task has."""
        return cls.columns

    @property
    def kinds(self) -> dict[str, str]:
        """The type of every field of a row; token ids take two bytes where they fit."""
        return {"ids": token_kind(self.tokenizer)}

    @abstractmethod
    def rows(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        """The rows of a chunk of records; what is left out is counted by reason."""

    def samples(self, store: Store, epoch: int) -> int:
        """How many samples a store has in an epoch."""
        return len(store)

    def lengths(self, store: Store, samples: Samples, epoch: int) -> NDArray[np.int64]:
        """Tokens of every side of each sample: (B, sides); samples of like lengths go into one batch."""
        return store.span("ids", samples)[1][:, None]

    @abstractmethod
    def batch(self, store: Store, samples: Samples, epoch: int, seed: int) -> Batch:
        """The samples as tensors."""


class Translation(Task):
    """A source and its target (teacher forcing: the target goes in one place later than it is asked for)."""

    columns = TRANSLATION
    roles = ("pad", "begin", "end", "unknown")

    @property
    def kinds(self) -> dict[str, str]:
        return {"source": token_kind(self.tokenizers[0]), "target": token_kind(self.tokenizers[-1])}

    def rows(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        source, target = self.tokenizers[0], self.tokenizers[-1]
        sides = zip(
            source.encode_batch([record.values[0] for record in records]),
            target.encode_batch([record.values[1] for record in records]),
            strict=True,
        )
        end, begin, close = source.id("end"), target.id("begin"), target.id("end")
        rows: list[Row] = []
        for ours, theirs in sides:
            reason = self._reason(len(ours), len(theirs))
            if reason:
                dropped[reason] += 1
            else:
                rows.append({"source": [*ours, end], "target": [begin, *theirs, close]})
        return rows

    def _reason(self, source: int, target: int) -> str:
        """Why a pair of so many tokens is left out, or nothing."""
        least, most = min(source, target), max(source, target)
        if not least:
            return "empty"
        if least < self.config.min_length:
            return "too short"
        if most + 1 > self.config.max_length:
            return "too long"
        return (
            "ratio" if self.config.max_length_ratio is not None and most > self.config.max_length_ratio * least else ""
        )

    def lengths(self, store: Store, samples: Samples, epoch: int) -> NDArray[np.int64]:
        return np.stack([store.span("source", samples)[1], store.span("target", samples)[1] - 1], axis=1)

    def batch(self, store: Store, samples: Samples, epoch: int, seed: int) -> Batch:
        source, source_lengths = store.take("source", samples)
        starts, lengths = store.span("target", samples)
        values = store.fields["target"][0]
        places = ranges(starts, lengths - 1)
        sides = {"source": {"source": source}, "target": {"target": values[places], "labels": values[places + 1]}}
        sizes = {"source": source_lengths, "target": lengths - 1}
        return arrange(sides, sizes, self.config.packed, self.padding)


class LanguageModel(Task):
    """All text as one stream of tokens, cut into windows of `longest`: every token is asked for from those before it.

    Windows begin at another place in every epoch. With `boundaries`, a batch is one packed row in which no document
    sees another; without, a document follows the other as if it were one text.
    """

    columns = TEXT
    roles = ("pad", "begin", "end", "unknown")
    stream = uniform = True

    def rows(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        begin, end = ([self.tokenizer.roles[role]] if role in self.tokenizer.roles else [] for role in ("begin", "end"))
        rows: list[Row] = []
        for record, ids in zip(records, self.tokenizer.encode_batch([r.values[0] for r in records]), strict=True):
            opens, closes = (*record.values, True, True)[1:3]  # a long document comes in several records
            rows.append({"ids": [*(begin if opens else ()), *ids, *(end if closes else ())], "opens": [int(opens)]})
        return rows

    @property
    def kinds(self) -> dict[str, str]:
        return {"ids": token_kind(self.tokenizer), "opens": "uint8"}

    def _range(self, store: Store, epoch: int) -> tuple[int, int]:
        """First token of the first window, and the token behind the last."""
        first, behind = (int(share * store.total("ids")) for share in self.share)
        shift = int(hash_ints(epoch)) % self.config.max_length if epoch else 0
        return min(first + shift, max(first, behind - self.config.max_length - 1)), behind

    def samples(self, store: Store, epoch: int) -> int:
        first, behind = self._range(store, epoch)
        return max(0, -(-(behind - first - 1) // self.config.max_length))

    def lengths(self, store: Store, samples: Samples, epoch: int) -> NDArray[np.int64]:
        return np.full((len(samples), 1), self.config.max_length)

    def batch(self, store: Store, samples: Samples, epoch: int, seed: int) -> Batch:
        first, behind = self._range(store, epoch)
        width = self.config.max_length
        starts = first + samples * width
        places = starts[:, None] + np.arange(width + 1)  # (B, T + 1)
        inside = places < behind
        tokens = store.fields["ids"][0][np.minimum(places, behind - 1)].astype(np.int64)
        labels = np.where(inside[:, 1:], tokens[:, 1:], IGNORED)
        real = int(inside[:, 1:].sum())
        if not self.config.isolate_documents:
            return Batch({"ids": torch.from_numpy(tokens[:, :-1].copy()), "labels": torch.from_numpy(labels)}, real)
        opens = self._opens(store, starts, width + 1)  # (B, T + 1)
        labels[opens[:, 1:]] = IGNORED  # the first token of a document follows from nothing
        begins = opens[:, :-1]
        begins[:, 0] = True
        lengths = np.diff(np.append(np.flatnonzero(begins.ravel()), begins.size))
        tensors = {
            "ids": torch.from_numpy(tokens[:, :-1].reshape(1, -1)),
            "labels": torch.from_numpy(labels.reshape(1, -1)),
        }
        return Batch(tensors, real, {"ids": Documents.of(lengths.tolist())})

    def _opens(self, store: Store, starts: Samples, width: int) -> NDArray[np.bool_]:
        """Where a document begins in each window: (B, width)."""
        ends, opens = store.fields["ids"][1], store.fields["opens"][0]
        found = np.zeros((len(starts), width), bool)
        for row, start in enumerate(starts):
            first, last = np.searchsorted(ends, [start, start + width])  # row r + 1 begins where row r ends
            rows = np.arange(first, min(last, len(ends) - 1))
            found[row, (ends[rows] - start)[opens[rows + 1] == 1]] = True
            found[row, 0] |= start == 0
        return found


HEADING = re.compile(r"\s*(= [^=]+ =\s*$|# \S)")  # of the first level, as a wiki or Markdown writes it


def documents(records: Iterator[Record], unit: str, piece: int = 1 << 16) -> Iterator[Record]:
    """Lines of plain text as documents, long ones in pieces: a line, a paragraph, an article, or a file.

    A paragraph ends with a blank line, an article where a heading of the first level begins the next. A record is
    (text, whether a document begins with it, whether it ends). A piece ends before a line end that stands between two
    letters, where no tokenizer joins anything, so that the pieces have the tokens of the whole.
    """
    if unit == "line":
        yield from (
            Record(record.place, (record.values[0], True, True)) for record in records if record.values[0].strip()
        )
        return
    lines: list[str] = []
    place, opens, size = Place("", 0), True, 0
    for record in records:
        line: str = record.values[0]
        ends = (unit == "paragraph" and not line.strip()) or (unit == "heading" and HEADING.match(line))
        if record.place.file != place.file or ends:
            yield from _piece(place, lines, opens, True)
            lines, place, opens, size = [], record.place, True, 0
            if unit == "paragraph" and not line.strip():
                continue
        elif size >= piece and lines[-1] and not lines[-1][-1].isspace() and line and not line[0].isspace():
            yield from _piece(place, lines, opens, False)
            lines, place, opens, size = [""], record.place, False, 0  # the line end belongs to the next piece
        lines.append(line)
        size += len(line)
    yield from _piece(place, lines, opens, True)


def _piece(place: Place, lines: list[str], opens: bool, closes: bool) -> Iterator[Record]:
    if any(line.strip() for line in lines):
        yield Record(place, ("\n".join(lines), opens, closes))


def token_kind(tokenizer: Tokenizer) -> str:
    """The smallest type that holds every id."""
    return "uint16" if len(tokenizer) <= 1 << 16 else "int32"
