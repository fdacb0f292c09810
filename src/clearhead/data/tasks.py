"""Task: encode records to cached token rows, collate samples to batches; translation and language modeling."""

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
from clearhead.data.batch import Batch, collate
from clearhead.data.formats import TEXT, TRANSLATION, Location, Record
from clearhead.data.random import hash_ints
from clearhead.data.token_store import Field, Row, TokenStore, concat_ranges
from clearhead.limits import MAX_TEXT_CHARS
from clearhead.model import Documents
from clearhead.ops.cross_entropy import IGNORED
from clearhead.text import Tokenizer
from clearhead.text.roles import Role

SampleIds = NDArray[np.int64]


class Task(ABC):
    """Base class: how records become cached token rows, and samples become batches."""

    columns: ClassVar[tuple[str, ...]] = ()
    roles: ClassVar[tuple[Role, ...]]  # special tokens of a tokenizer trained for this task
    is_stream: ClassVar[bool] = False  # records are documents that may be cut anywhere
    stream_range: tuple[float, float] = (0.0, 1.0)  # part of the stream in this split, as fractions
    fixed_length: ClassVar[bool] = False  # all samples have the same length

    def __init__(self, config: DataConfig, tokenizers: Sequence[Tokenizer], labels: Sequence[str] = ()):
        self.config, self.tokenizers, self.labels = config, tokenizers, tuple(labels)
        self.label_ids = {label: number for number, label in enumerate(self.labels)}
        self.tokenizer = tokenizers[0]
        pads = [each.roles.get("pad", 0) for each in tokenizers]
        self.pad_values = {"source": pads[0], "target": pads[-1], "ids": pads[0], "first": pads[0], "second": pads[0]}
        self.pad_values["labels"] = IGNORED

    @classmethod
    def record_columns(cls, config: DataConfig) -> tuple[str, ...]:
        """Return the columns of a record."""
        return cls.columns

    @property
    def fields(self) -> dict[str, Field]:
        """Return the fields of a row, and what their values may be."""
        return {"ids": token_field(self.tokenizer)}

    @abstractmethod
    def encode_records(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        """Tokenize a chunk of records to rows; count dropped records by reason."""

    def num_samples(self, store: TokenStore, epoch: int) -> int:
        """Return the number of samples of a store in an epoch."""
        return len(store)

    def lengths(self, store: TokenStore, samples: SampleIds, epoch: int) -> NDArray[np.int64]:
        """Return the number of tokens of each side of each sample, for batching by length: (B, sides)."""
        return store.spans("ids", samples)[1][:, None]

    @abstractmethod
    def batch(self, store: TokenStore, samples: SampleIds, epoch: int, seed: int) -> Batch:
        """Collate samples to tensors."""


class Translation(Task):
    """Source and target; the decoder input is the labels shifted right by one (teacher forcing)."""

    columns = TRANSLATION
    roles = ("pad", "begin", "end", "unknown")

    @property
    def fields(self) -> dict[str, Field]:
        return {"source": token_field(self.tokenizers[0]), "target": token_field(self.tokenizers[-1], shortest=2)}

    def encode_records(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        source, target = self.tokenizers[0], self.tokenizers[-1]
        sides = zip(
            source.encode_batch([record.values[0] for record in records]),
            target.encode_batch([record.values[1] for record in records]),
            strict=True,
        )
        source_end, begin, end = source.id("end"), target.id("begin"), target.id("end")
        rows: list[Row] = []
        for source_ids, target_ids in sides:
            reason = self._drop_reason(len(source_ids), len(target_ids))
            if reason:
                dropped[reason] += 1
            else:
                rows.append({"source": [*source_ids, source_end], "target": [begin, *target_ids, end]})
        return rows

    def _drop_reason(self, source_length: int, target_length: int) -> str:
        """Return why a pair of these lengths is dropped, or an empty string."""
        shorter, longer = min(source_length, target_length), max(source_length, target_length)
        if not shorter:
            return "empty"
        if shorter < self.config.min_length:
            return "too short"
        if longer + 1 > self.config.max_length:
            return "too long"
        max_ratio = self.config.max_length_ratio
        return "ratio" if max_ratio is not None and longer > max_ratio * shorter else ""

    def lengths(self, store: TokenStore, samples: SampleIds, epoch: int) -> NDArray[np.int64]:
        return np.stack([store.spans("source", samples)[1], store.spans("target", samples)[1] - 1], axis=1)

    def batch(self, store: TokenStore, samples: SampleIds, epoch: int, seed: int) -> Batch:
        source, source_lengths = store.gather("source", samples)
        starts, lengths = store.spans("target", samples)
        values = store.fields["target"][0]
        index = concat_ranges(starts, lengths - 1)
        sides = {"source": {"source": source}, "target": {"target": values[index], "labels": values[index + 1]}}
        return collate(sides, {"source": source_lengths, "target": lengths - 1}, self.config.packed, self.pad_values)


class LanguageModel(Task):
    """Next-token prediction over one stream of tokens, cut into windows of `max_length`.

    The first window starts at another offset in every epoch. With `isolate_documents`, a batch is one packed row with
    attention within documents only; otherwise attention crosses document boundaries.
    """

    columns = TEXT
    roles = ("pad", "begin", "end", "unknown")
    is_stream = fixed_length = True

    def encode_records(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        begin, end = ([self.tokenizer.roles[role]] if role in self.tokenizer.roles else [] for role in ("begin", "end"))
        rows: list[Row] = []
        for record, ids in zip(records, self.tokenizer.encode_batch([r.values[0] for r in records]), strict=True):
            opens, closes = (*record.values, True, True)[1:3]  # a long document is split into several records
            rows.append({"ids": [*(begin if opens else ()), *ids, *(end if closes else ())], "opens": [int(opens)]})
        return rows

    @property
    def fields(self) -> dict[str, Field]:
        return {"ids": token_field(self.tokenizer, shortest=0), "opens": Field("uint8", 2, row=1)}

    def _range(self, store: TokenStore, epoch: int) -> tuple[int, int]:
        """Return the start of the first window and the end of the last."""
        start, end = (int(fraction * store.num_values("ids")) for fraction in self.stream_range)
        shift = int(hash_ints(epoch)) % self.config.max_length if epoch else 0
        return min(start + shift, max(start, end - self.config.max_length - 1)), end

    def num_samples(self, store: TokenStore, epoch: int) -> int:
        start, end = self._range(store, epoch)
        return max(0, -(-(end - start - 1) // self.config.max_length))

    def lengths(self, store: TokenStore, samples: SampleIds, epoch: int) -> NDArray[np.int64]:
        return np.full((len(samples), 1), self.config.max_length)

    def batch(self, store: TokenStore, samples: SampleIds, epoch: int, seed: int) -> Batch:
        start, end = self._range(store, epoch)
        max_length = self.config.max_length
        starts = start + samples * max_length
        index = starts[:, None] + np.arange(max_length + 1)  # (B, T + 1)
        inside = index < end
        tokens = store.fields["ids"][0][np.minimum(index, end - 1)].astype(np.int64)
        labels = np.where(inside[:, 1:], tokens[:, 1:], IGNORED)
        num_tokens = int(inside[:, 1:].sum())
        if not self.config.isolate_documents:
            return Batch(
                {"ids": torch.from_numpy(tokens[:, :-1].copy()), "labels": torch.from_numpy(labels)}, num_tokens
            )
        is_start = self._document_starts(store, starts, max_length + 1)  # (B, T + 1)
        labels[is_start[:, 1:]] = IGNORED  # a document's first token has no context
        is_start = is_start[:, :-1]
        is_start[:, 0] = True
        lengths = np.diff(np.append(np.flatnonzero(is_start.ravel()), is_start.size))
        tensors = {
            "ids": torch.from_numpy(tokens[:, :-1].reshape(1, -1)),
            "labels": torch.from_numpy(labels.reshape(1, -1)),
        }
        return Batch(tensors, num_tokens, {"ids": Documents.from_lengths(lengths.tolist())})

    def _document_starts(self, store: TokenStore, starts: SampleIds, size: int) -> NDArray[np.bool_]:
        """Mark the first token of each document in the windows: (B, size)."""
        ends, opens = store.fields["ids"][1], store.fields["opens"][0]
        is_start = np.zeros((len(starts), size), bool)
        for window, start in enumerate(starts):
            first, last = np.searchsorted(ends, [start, start + size])  # row r + 1 starts where row r ends
            rows = np.arange(first, min(last, len(ends) - 1))
            is_start[window, (ends[rows] - start)[opens[rows + 1] == 1]] = True
            is_start[window, 0] |= start == 0
        return is_start


HEADING = re.compile(r"\s*(= [^=]+ =\s*$|# \S)")  # top-level heading in wiki or Markdown syntax


def split_documents(records: Iterator[Record], unit: str, max_chars: int = 1 << 16) -> Iterator[Record]:
    """Join lines of plain text to documents: by line, paragraph (blank line), top-level heading, or file.

    Documents longer than `max_chars` are split into several records (text, opens, closes): the flags mark the first and
    the last record of a document. Splits are before a newline without adjacent whitespace, where no tokenizer merges,
    so that the tokens do not change; only if there is none in MAX_TEXT_CHARS characters, they are before any newline.
    """
    if unit == "line":
        yield from (
            Record(record.location, (record.values[0], True, True)) for record in records if record.values[0].strip()
        )
        return
    lines: list[str] = []
    location, opens, size = Location("", 0), True, 0
    for record in records:
        line: str = record.values[0]
        ends = (unit == "paragraph" and not line.strip()) or (unit == "heading" and HEADING.match(line))
        if record.location.file != location.file or ends:
            yield from _join_lines(location, lines, opens, True)
            lines, location, opens, size = [], record.location, True, 0
            if unit == "paragraph" and not line.strip():
                continue
        elif _may_split(lines, line, size, max_chars):
            yield from _join_lines(location, lines, opens, False)
            lines, location, opens, size = [""], record.location, False, 0  # the newline goes to the next piece
        lines.append(line)
        size += len(line) + 1
    yield from _join_lines(location, lines, opens, True)


def split_long_texts(records: Iterator[Record], max_chars: int = 1 << 16) -> Iterator[Record]:
    """Split texts of more than `max_chars` characters as `split_documents` does."""
    for record in records:
        text = record.values[0]
        if isinstance(text, str) and len(text) > max_chars:
            lines = (record._replace(values=(line,)) for line in text.split("\n"))
            yield from split_documents(lines, "file", max_chars)
        else:
            yield record


def _may_split(lines: list[str], line: str, size: int, max_chars: int) -> bool:
    """Whether a document of these lines is split before `line`."""
    if not lines or size + len(line) > MAX_TEXT_CHARS:
        return bool(lines)
    before, after = lines[-1][-1:], line[:1]
    return size >= max_chars and bool(before and after) and not before.isspace() and not after.isspace()


def _join_lines(location: Location, lines: list[str], opens: bool, closes: bool) -> Iterator[Record]:
    if any(line.strip() for line in lines):
        yield Record(location, ("\n".join(lines), opens, closes))


def token_field(tokenizer: Tokenizer, shortest: int = 1) -> Field:
    """Return a field of token ids, in the smallest dtype for all of them."""
    return Field("uint16" if len(tokenizer) <= 1 << 16 else "int32", len(tokenizer), shortest=shortest)
