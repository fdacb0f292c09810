"""Tasks with labels: classes and values of one text or two, tags of words, answers in a context, similar pairs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.config.data import DataConfig
from clearhead.config.settings import nearest
from clearhead.data.batch import Batch, arrange
from clearhead.data.formats import ANSWERS, PAIR, TAGS, TEXT, Record
from clearhead.data.store import Row, Store
from clearhead.data.tasks import Samples, Task, token_kind
from clearhead.errors import UserError
from clearhead.ops.cross_entropy import IGNORED
from clearhead.text import Role, Tokenizer

LARGEST = float(np.finfo(np.float32).max)  # of a score, which is kept in four bytes
ROLES: tuple[Role, ...] = ("pad", "unknown", "class", "separator", "mask")


def frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What stands before a text and behind it: BERT's tokens, or begin and end, or nothing where there are none."""
    roles = tokenizer.roles
    opens, closes = ("class", "separator") if "separator" in roles else ("begin", "end")
    return [roles[role] for role in (opens,) if role in roles], [roles[role] for role in (closes,) if role in roles]


def enclose(
    tokenizer: Tokenizer, max_length: int, first: list[int], second: list[int] | None = None
) -> tuple[list[int], int]:
    """The ids in their frame, cut to `longest` (the longer text first), and where the second text begins."""
    opens, closes = frame(tokenizer)
    room = max_length - len(opens) - len(closes) * (1 if second is None else 2)
    n, m = len(first), len(second or ())
    if n + m > room:  # both keep half, or what they have
        half = room // 2
        n, m = (room - m, m) if m <= half else (n, room - n) if n <= half else (room - half, half)
    ids = [*opens, *first[:n], *closes]
    return (ids, len(ids)) if second is None else ([*ids, *second[:m], *closes], len(ids))


def label_number(record: Record, label: Any, labels: tuple[str, ...]) -> int:
    """The number of a label; one that is not among the allowed is an error with its place."""
    if not isinstance(label, str | int) or isinstance(label, bool):
        raise UserError(f"{record.place}: {label!r:.40} is no label; use a text or a whole number")
    if label == "":
        raise UserError(f"{record.place}: the label is missing")
    if str(label) not in labels:
        near = nearest(str(label), list(labels)) if labels else ", which is empty; name the labels"
        raise UserError(f"{record.place}: label {str(label)!r:.40} is not in the label set{near}")
    return labels.index(str(label))


def is_empty(text: str, tokens: Sequence[object]) -> bool:
    """Whether there is nothing to read in a text: blanks alone, or nothing that its tokenizer knows."""
    return not tokens or not text.strip()


class _Framed(Task):
    """Rows of `open text close`, or `open text close second close`."""

    roles = ROLES

    def enclose(self, first: list[int], second: list[int] | None = None) -> tuple[list[int], int]:
        return enclose(self.tokenizer, self.config.max_length, first, second)

    def framed(self, store: Store, samples: Samples, others: dict[str, NDArray[Any]], **fields: NDArray[Any]) -> Batch:
        """A batch of the store's ids with segments, and with labels for every token or every row."""
        ids, lengths = store.take("ids", samples)
        place = np.arange(len(ids)) - np.repeat(lengths.cumsum() - lengths, lengths)
        boundary = np.repeat(store.take("boundary", samples)[0], lengths)
        sides = {"ids": {"ids": ids, "segments": (place >= boundary).astype(np.int64), **fields}}
        return arrange(sides, {"ids": lengths}, self.config.packed, self.padding, others)


class Classification(_Framed):
    """A label for a text, or for two."""

    label_kind = "int64"

    @classmethod
    def reads(cls, config: DataConfig) -> tuple[str, ...]:
        return (*(PAIR if config.text_pairs else TEXT), "label")

    @property
    def kinds(self) -> dict[str, str]:
        return {"ids": token_kind(self.tokenizer), "boundary": "int32", "label": self.label_kind}

    def rows(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        sides = [
            self.tokenizer.encode_batch([r.values[side] for r in records])
            for side in range(2 if self.config.text_pairs else 1)
        ]
        rows: list[Row] = []
        for record, *texts in zip(records, *sides, strict=True):
            label = self.label(record)
            ids, boundary = self.enclose(*texts)
            if any(map(is_empty, record.values, texts)):
                dropped["empty"] += 1
            else:
                rows.append({"ids": ids, "boundary": [boundary], "label": [label]})
        return rows

    def label(self, record: Record) -> float:
        """What is asked for."""
        return label_number(record, record.values[-1], self.labels)

    def batch(self, store: Store, samples: Samples, epoch: int, seed: int) -> Batch:
        labels = store.take("label", samples)[0]
        return self.framed(store, samples, {"labels": np.array(labels)})


class Regression(Classification):
    """A number for a text, or for two."""

    label_kind = "float32"

    def label(self, record: Record) -> float:
        return number(record)


class Similarity(Classification):
    """Two texts, each by itself, and how alike they are: 1 for the same, or for all pairs of a contrastive set."""

    label_kind = "float32"

    @classmethod
    def reads(cls, config: DataConfig) -> tuple[str, ...]:
        return PAIR if config.contrastive else (*PAIR, "label")

    @property
    def kinds(self) -> dict[str, str]:
        kind = token_kind(self.tokenizer)
        return {"first": kind, "second": kind, "label": self.label_kind}

    def rows(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        sides = [self.tokenizer.encode_batch([r.values[side] for r in records]) for side in (0, 1)]
        rows: list[Row] = []
        for record, first, second in zip(records, *sides, strict=True):
            label = 1.0 if self.config.contrastive else self.likeness(record)
            if any(map(is_empty, record.values, (first, second))):
                dropped["empty"] += 1
            else:
                rows.append({"first": self.enclose(first)[0], "second": self.enclose(second)[0], "label": [label]})
        return rows

    def likeness(self, record: Record) -> float:
        """The score of a pair as a share of the highest; a cosine can be no more than 1."""
        value, highest = number(record), self.config.max_score
        if abs(value) > highest:
            raise UserError(f"{record.place}: a score of {value:g}, but data.max_score is {highest:g}; raise it")
        return value / highest

    def lengths(self, store: Store, samples: Samples, epoch: int) -> NDArray[np.int64]:
        return np.stack([store.span(side, samples)[1] for side in ("first", "second")], axis=1)

    def batch(self, store: Store, samples: Samples, epoch: int, seed: int) -> Batch:
        sides, lengths = {}, {}
        for side in ("first", "second"):
            values, lengths[side] = store.take(side, samples)
            sides[side] = {side: values}
        labels = np.array(store.take("label", samples)[0])
        return arrange(sides, lengths, self.config.packed, self.padding, {"labels": labels})


class Tagging(_Framed):
    """A tag for every word; of the tokens of a word, the first carries it."""

    columns = TAGS

    @property
    def kinds(self) -> dict[str, str]:
        return {"ids": token_kind(self.tokenizer), "boundary": "int32", "labels": "int64"}

    def rows(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        for record in records:
            check_tags(record)
        texts = [" ".join(record.values[0]) for record in records]
        rows: list[Row] = []
        for record, tokens in zip(records, self.tokenizer.offsets_batch(texts), strict=True):
            tags = enumerate(record.values[1])
            numbers = [label_number(record._replace(place=record.place.at(n)), tag, self.labels) for n, tag in tags]
            if not tokens:
                dropped["empty"] += 1
                continue
            opens, closes = frame(self.tokenizer)
            tokens = tokens[: self.config.max_length - len(opens) - len(closes)]
            labels = [IGNORED if word is None else numbers[word] for word in first_tokens(record.values[0], tokens)]
            ids, boundary = self.enclose([token for token, _, _ in tokens])
            framed = [IGNORED] * len(opens) + labels + [IGNORED] * len(closes)
            rows.append({"ids": ids, "boundary": [boundary], "labels": framed})
        return rows

    def batch(self, store: Store, samples: Samples, epoch: int, seed: int) -> Batch:
        return self.framed(store, samples, {}, labels=store.take("labels", samples)[0])


def first_tokens(words: list[str], tokens: list[tuple[int, int, int]]) -> list[int | None]:
    """For every token of the words joined by spaces, the word it is the first token of, or None."""
    starts = [0]
    for each in words[:-1]:
        starts.append(starts[-1] + len(each) + 1)
    found: list[int | None] = []
    taken = -1
    for _, first, behind in tokens:
        # A byte-level token begins with the space before its word, so its last character tells the word.
        word = bisect_right(starts, max(first, behind - 1)) - 1
        inside = behind > first and max(first, behind - 1) < starts[word] + len(words[word])
        found.append(word if inside and word > taken else None)
        taken = max(taken, word) if inside else taken
    return found


def check_tags(record: Record) -> None:
    """Refuse a sentence whose tokens and tags do not go together."""
    tokens, tags = record.values
    if isinstance(tokens, str):
        raise UserError(f"{record.place}: tokens are a text; give a list of words")
    if not isinstance(tokens, list) or not isinstance(tags, list):
        raise UserError(f"{record.place}: tokens and tags must be lists; give a list of words and a list of tags")
    if len(tokens) != len(tags):
        raise UserError(f"{record.place}: {len(tokens)} tokens but {len(tags)} tags; give every token one tag")


class Answering(_Framed):
    """A question and a context: the answer's first and last token, or the first of all where there is no answer.

    A context that does not fit comes in windows that share `stride` tokens; where a window does not hold the whole
    answer, it holds none.
    """

    columns = ANSWERS

    @property
    def kinds(self) -> dict[str, str]:
        return {"ids": token_kind(self.tokenizer), "boundary": "int32", "span": "int32"}

    def rows(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        for record in records:
            check_answer(record)
        contexts = self.tokenizer.offsets_batch([record.values[0] for record in records])
        questions = self.tokenizer.encode_batch([record.values[1] for record in records])
        opens, closes = frame(self.tokenizer)
        rows: list[Row] = []
        for record, context, question in zip(records, contexts, questions, strict=True):
            first, last = self._tokens_of(record, context)
            if is_empty(record.values[0], context) or is_empty(record.values[1], question):
                dropped["empty"] += 1
                continue
            question = question[: self.config.max_length // 2]
            room = self.config.max_length - len(opens) - len(question) - 2 * len(closes)
            for start in windows(len(context), room, self.config.stride):
                window = [token for token, _, _ in context[start : start + room]]
                begin = len(opens) + len(question) + len(closes)
                inside = first is not None and start <= first and last < start + room
                span = [begin + (first or 0) - start, begin + last - start] if inside else [0, 0]
                ids = [*opens, *question, *closes, *window, *closes]
                rows.append({"ids": ids, "boundary": [begin], "span": span})
        return rows

    def _tokens_of(self, record: Record, context: list[tuple[int, int, int]]) -> tuple[int | None, int]:
        """The first and the last token that touch the answer; None where there is no answer."""
        _, _, answer, start = record.values
        touched = [n for n, (_, a, b) in enumerate(context) if a < start + len(answer) and b > start and b > a]
        return (touched[0], touched[-1]) if answer and touched else (None, 0)

    def batch(self, store: Store, samples: Samples, epoch: int, seed: int) -> Batch:
        spans = np.array(store.take("span", samples)[0], np.int64).reshape(-1, 2)
        return self.framed(store, samples, {"first_token": spans[:, 0].copy(), "last_token": spans[:, 1].copy()})


def windows(length: int, room: int, stride: int) -> list[int]:
    """Where windows of `room` tokens begin, so that they cover `length` and neighbors share `stride`."""
    if room <= stride:
        raise UserError(f"stride: {stride}, but longest leaves only {room} tokens for the context; lower it")
    starts = [0]
    while starts[-1] + room < length:
        starts.append(starts[-1] + room - stride)
    return starts


def check_answer(record: Record) -> None:
    """Refuse an answer that does not stand where it is said to."""
    context, _, answer, start = record.values
    if not isinstance(answer, str):
        raise UserError(f"{record.place}: the answer is {answer!r:.40}, not a text; put it in quotes")
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise UserError(f"{record.place}: the answer's start is {start!r:.40}; give a whole number from 0 on")
    there = context[start : start + len(answer)]
    if there != answer:
        raise UserError(
            f"{record.place}: the answer {answer!r:.40} does not stand at character {start} of the context (there: "
            f"{there!r:.40}); count characters, not bytes, from 0"
        )


def number(record: Record) -> float:
    """The last value of a record as a finite number."""
    try:
        value = float(record.values[-1])
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= LARGEST or isinstance(record.values[-1], bool):
        raise UserError(f"{record.place}: {record.values[-1]!r:.40} is not a number; check which column is the score")
    return value
