"""Labeled tasks: classification, regression, similarity, tagging, extractive question answering."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.config.data import DataConfig
from clearhead.config.settings import nearest
from clearhead.data.batch import Batch, collate
from clearhead.data.formats import ANSWERS, PAIR, TAGS, TEXT, Record
from clearhead.data.tasks import SampleIds, Task, token_field
from clearhead.data.token_store import MAX_POSITION, TRUNCATED, Field, Row, TokenStore
from clearhead.errors import UserError
from clearhead.ops.cross_entropy import IGNORED
from clearhead.text import Role, Tokenizer

FLOAT32_MAX = float(np.finfo(np.float32).max)  # scores are stored as float32
ROLES: tuple[Role, ...] = ("pad", "unknown", "class", "separator", "mask")


def special_prefix_suffix(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a text: BERT's [CLS] and [SEP], or begin and end, or none."""
    roles = tokenizer.roles
    opens, closes = ("class", "separator") if "separator" in roles else ("begin", "end")
    return [roles[role] for role in (opens,) if role in roles], [roles[role] for role in (closes,) if role in roles]


def add_special_tokens(
    tokenizer: Tokenizer, max_length: int, first: list[int], second: list[int] | None = None
) -> tuple[list[int], int]:
    """Add special tokens, truncating the longer text first to `max_length`; return ids and start of the second text."""
    prefix, suffix = special_prefix_suffix(tokenizer)
    between = suffix * tokenizer.separators_in_pair
    room = max_length - len(prefix) - len(suffix) - (0 if second is None else len(between))
    n, m = len(first), len(second or ())
    if n + m > room:  # each keeps at least half of `room`, or all of its tokens
        half = room // 2
        n, m = (room - m, m) if m <= half else (n, room - n) if n <= half else (room - half, half)
    ids = [*prefix, *first[:n], *(suffix if second is None else between)]
    return (ids, len(ids)) if second is None else ([*ids, *second[:m], *suffix], len(ids))


def label_id(record: Record, label: Any, labels: Mapping[str, int]) -> int:
    """Return the id of a label; raise if it is not in the label set."""
    if not isinstance(label, str | int) or isinstance(label, bool):
        raise UserError(f"{record.location}: {label!r:.40} is not a label; use a string or an integer")
    if label == "":
        raise UserError(f"{record.location}: the label is missing; add it, or set columns.label")
    if str(label) not in labels:
        hint = nearest(str(label), list(labels)) if labels else ", which is empty; name the labels"
        raise UserError(f"{record.location}: label {str(label)!r:.40} is not in the label set{hint}")
    return labels[str(label)]


def is_empty(text: str, tokens: Sequence[object]) -> bool:
    """Return whether a text is blank or has no tokens."""
    return not tokens or not text.strip()


class _SequenceTask(Task):
    """Rows of one text or two with special tokens: `[CLS] text [SEP]` or `[CLS] text [SEP] second [SEP]`."""

    roles = ROLES

    @property
    def sequence_fields(self) -> dict[str, Field]:
        """Return the fields of the ids, and of the start of the second text."""
        return {"ids": token_field(self.tokenizer), "boundary": Field("int32", MAX_POSITION, row=1)}

    def add_special_tokens(self, first: list[int], second: list[int] | None = None) -> tuple[list[int], int]:
        return add_special_tokens(self.tokenizer, self.config.max_length, first, second)

    def is_truncated(self, *texts: Sequence[object]) -> bool:
        """Return whether the tokens of a row's texts are more than `max_length` leaves room for."""
        prefix, suffix = special_prefix_suffix(self.tokenizer)
        return len(prefix) + sum(len(text) + len(suffix) for text in texts) > self.config.max_length

    def collate_sequences(
        self, store: TokenStore, samples: SampleIds, per_row: dict[str, NDArray[Any]], **fields: NDArray[Any]
    ) -> Batch:
        """Collate ids and segments with labels per token (`fields`) or per row."""
        ids, lengths = store.gather("ids", samples)
        position = np.arange(len(ids)) - np.repeat(lengths.cumsum() - lengths, lengths)
        boundary = np.repeat(store.gather("boundary", samples)[0], lengths)
        sides = {"ids": {"ids": ids, "segments": (position >= boundary).astype(np.int64), **fields}}
        return collate(sides, {"ids": lengths}, self.config.packed, self.pad_values, per_row)


class Classification(_SequenceTask):
    """One label for a text or a pair of texts."""

    @property
    def label_field(self) -> Field:
        """Return the field of the label."""
        return Field("int64", len(self.labels), row=1)

    @classmethod
    def record_columns(cls, config: DataConfig) -> tuple[str, ...]:
        return (*(PAIR if config.text_pairs else TEXT), "label")

    @property
    def fields(self) -> dict[str, Field]:
        return self.sequence_fields | {"label": self.label_field}

    def encode_records(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        sides = [
            self.tokenizer.encode_batch([r.values[side] for r in records])
            for side in range(2 if self.config.text_pairs else 1)
        ]
        rows: list[Row] = []
        for record, *texts in zip(records, *sides, strict=True):
            label = self.label(record)
            ids, boundary = self.add_special_tokens(*texts)
            if any(map(is_empty, record.values, texts)):
                dropped["empty"] += 1
            else:
                dropped[TRUNCATED] += self.is_truncated(*texts)
                rows.append({"ids": ids, "boundary": [boundary], "label": [label]})
        return rows

    def label(self, record: Record) -> float:
        """Return the label of a record as a number."""
        return label_id(record, record.values[-1], self.label_ids)

    def batch(self, store: TokenStore, samples: SampleIds, epoch: int, seed: int) -> Batch:
        labels = store.gather("label", samples)[0]
        return self.collate_sequences(store, samples, {"labels": np.array(labels)})


class Regression(Classification):
    """One number for a text or a pair of texts."""

    label_field = Field("float32", row=1)

    def label(self, record: Record) -> float:
        return score_value(record)


class Similarity(Classification):
    """Two separately encoded texts and their similarity in [-1, 1]; contrastive pairs all have 1."""

    label_field = Field("float32", row=1)

    @classmethod
    def record_columns(cls, config: DataConfig) -> tuple[str, ...]:
        return PAIR if config.contrastive else (*PAIR, "label")

    @property
    def fields(self) -> dict[str, Field]:
        tokens = token_field(self.tokenizer)
        return {"first": tokens, "second": tokens, "label": self.label_field}

    def encode_records(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        sides = [self.tokenizer.encode_batch([r.values[side] for r in records]) for side in (0, 1)]
        rows: list[Row] = []
        for record, first, second in zip(records, *sides, strict=True):
            label = 1.0 if self.config.contrastive else self.scaled_score(record)
            if any(map(is_empty, record.values, (first, second))):
                dropped["empty"] += 1
            else:
                dropped[TRUNCATED] += self.is_truncated(first) or self.is_truncated(second)
                rows.append(
                    {
                        "first": self.add_special_tokens(first)[0],
                        "second": self.add_special_tokens(second)[0],
                        "label": [label],
                    }
                )
        return rows

    def scaled_score(self, record: Record) -> float:
        """Return the score divided by `max_score`, the range of a cosine."""
        value, max_score = score_value(record), self.config.max_score
        if abs(value) > max_score:
            raise UserError(f"{record.location}: a score of {value:g}, but data.max_score is {max_score:g}; raise it")
        return value / max_score

    def lengths(self, store: TokenStore, samples: SampleIds, epoch: int) -> NDArray[np.int64]:
        return np.stack([store.spans(side, samples)[1] for side in ("first", "second")], axis=1)

    def batch(self, store: TokenStore, samples: SampleIds, epoch: int, seed: int) -> Batch:
        sides, lengths = {}, {}
        for side in ("first", "second"):
            values, lengths[side] = store.gather(side, samples)
            sides[side] = {side: values}
        labels = np.array(store.gather("label", samples)[0])
        return collate(sides, lengths, self.config.packed, self.pad_values, {"labels": labels})


class Tagging(_SequenceTask):
    """One tag per word, on its first token; the other tokens are ignored."""

    columns = TAGS

    @property
    def fields(self) -> dict[str, Field]:
        return self.sequence_fields | {"labels": Field("int64", len(self.labels), IGNORED, row="ids")}

    def encode_records(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        for record in records:
            check_tags(record)
        texts = [" ".join(record.values[0]) for record in records]
        rows: list[Row] = []
        for record, tokens in zip(records, self.tokenizer.offsets_batch(texts), strict=True):
            tags = enumerate(record.values[1])
            tag_ids = [
                label_id(Record(record.location.for_item(n), record.values), tag, self.label_ids) for n, tag in tags
            ]
            if not tokens:
                dropped["empty"] += 1
                continue
            dropped[TRUNCATED] += self.is_truncated(tokens)
            prefix, suffix = special_prefix_suffix(self.tokenizer)
            tokens = tokens[: self.config.max_length - len(prefix) - len(suffix)]
            labels = [
                IGNORED if word is None else tag_ids[word] for word in first_token_words(record.values[0], tokens)
            ]
            ids, boundary = self.add_special_tokens([token for token, _, _ in tokens])
            labels = [IGNORED] * len(prefix) + labels + [IGNORED] * len(suffix)
            rows.append({"ids": ids, "boundary": [boundary], "labels": labels})
        return rows

    def batch(self, store: TokenStore, samples: SampleIds, epoch: int, seed: int) -> Batch:
        return self.collate_sequences(store, samples, {}, labels=store.gather("labels", samples)[0])


def first_token_words(words: list[str], tokens: list[tuple[int, int, int]]) -> list[int | None]:
    """Return, for each token of the space-joined words, the index of the word it starts, or None."""
    starts = [0]
    for word in words[:-1]:
        starts.append(starts[-1] + len(word) + 1)
    result: list[int | None] = []
    last_word = -1
    for _, start, end in tokens:
        # A byte-level token includes the space before its word, so its last character decides.
        index = bisect_right(starts, max(start, end - 1)) - 1
        inside = end > start and max(start, end - 1) < starts[index] + len(words[index])
        result.append(index if inside and index > last_word else None)
        last_word = max(last_word, index) if inside else last_word
    return result


def check_tags(record: Record) -> None:
    """Raise if tokens and tags are not lists of the same length."""
    tokens, tags = record.values
    if isinstance(tokens, str):
        raise UserError(f"{record.location}: tokens are a string; give a list of words")
    if not isinstance(tokens, list) or not isinstance(tags, list):
        raise UserError(f"{record.location}: tokens and tags must be lists; give a list of words and a list of tags")
    if len(tokens) != len(tags):
        raise UserError(f"{record.location}: {len(tokens)} tokens but {len(tags)} tags; give every token one tag")


class Answering(_SequenceTask):
    """Extractive question answering: predict the first and last token of the answer, or [CLS] if there is none.

    A long context is split into windows that overlap by `stride` tokens; a window without the whole answer has none.
    """

    columns = ANSWERS

    def __init__(self, config: DataConfig, tokenizers: Sequence[Tokenizer], labels: Sequence[str] = ()):
        super().__init__(config, tokenizers, labels)
        self.contexts: dict[str, _Context] = {}  # of the latest records

    @property
    def fields(self) -> dict[str, Field]:
        return self.sequence_fields | {"span": Field("int32", MAX_POSITION, row=2, within="ids")}

    def encode_records(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        for record in records:
            check_answer(record)
        texts = dict.fromkeys(record.values[0] for record in records)  # once for all their questions
        self.contexts = {text: self.contexts[text] for text in texts if text in self.contexts}
        new = [text for text in texts if text not in self.contexts]
        self.contexts |= zip(new, map(_Context, self.tokenizer.offsets_batch(new)), strict=True)
        questions = self.tokenizer.encode_batch([record.values[1] for record in records])
        prefix, suffix = special_prefix_suffix(self.tokenizer)
        rows: list[Row] = []
        for record, question in zip(records, questions, strict=True):
            context = self.contexts[record.values[0]]
            if is_empty(record.values[0], context.ids) or is_empty(record.values[1], question):
                dropped["empty"] += 1
                continue
            first, last = context.answer_span(*record.values[2:])
            dropped[TRUNCATED] += len(question) > self.config.max_length // 2
            question = question[: self.config.max_length // 2]
            offset = len(prefix) + len(question) + len(suffix)
            size = self.config.max_length - offset - len(suffix)
            for start in window_starts(len(context.ids), size, self.config.stride):
                window = context.ids[start : start + size]
                inside = first is not None and start <= first and last < start + size
                span = [offset + (first or 0) - start, offset + last - start] if inside else [0, 0]
                ids = [*prefix, *question, *suffix, *window, *suffix]
                rows.append({"ids": ids, "boundary": [offset], "span": span})
        return rows

    def batch(self, store: TokenStore, samples: SampleIds, epoch: int, seed: int) -> Batch:
        spans = np.array(store.gather("span", samples)[0], np.int64).reshape(-1, 2)
        return self.collate_sequences(
            store, samples, {"first_token": spans[:, 0].copy(), "last_token": spans[:, 1].copy()}
        )


class _Context:
    """The tokens of a context, which several questions share."""

    def __init__(self, tokens: list[tuple[int, int, int]]):
        self.ids = [token for token, _, _ in tokens]
        self.offsets = np.array([offsets for _, *offsets in tokens], np.int64).reshape(-1, 2)

    def answer_span(self, answer: str, start: int) -> tuple[int | None, int]:
        """Return the first and last token that overlap the answer; None if there is no answer."""
        if not answer:
            return None, 0
        begins, ends = self.offsets.T
        inside = np.flatnonzero((begins < start + len(answer)) & (ends > start) & (ends > begins))
        return (int(inside[0]), int(inside[-1])) if len(inside) else (None, 0)


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Return the starts of windows that cover `length` tokens and overlap by `stride`."""
    if window <= stride:
        raise UserError(f"stride: {stride}, but max_length leaves only {window} tokens for the context; lower it")
    starts = [0]
    while starts[-1] + window < length:
        starts.append(starts[-1] + window - stride)
    return starts


def check_answer(record: Record) -> None:
    """Raise if the context does not contain the answer at its start offset."""
    context, _, answer, start = record.values
    if not isinstance(answer, str):
        raise UserError(f"{record.location}: the answer is {answer!r:.40}, not a text; put it in quotes")
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise UserError(f"{record.location}: the answer's start is {start!r:.40}; give an integer, 0 or more")
    actual = context[start : start + len(answer)]
    if actual != answer:
        raise UserError(
            f"{record.location}: the answer {answer!r:.40} is not at character {start} of the context (there: "
            f"{actual!r:.40}); count characters, not bytes, from 0"
        )


def score_value(record: Record) -> float:
    """Return the last value of a record as a finite number."""
    try:
        value = float(record.values[-1])
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= FLOAT32_MAX or isinstance(record.values[-1], bool):
        raise UserError(
            f"{record.location}: {record.values[-1]!r:.40} is not a number; check which column is the score"
        )
    return value
