"""Texts through a network that reads: framed, sorted by length, packed without padding, back in the order they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.data.cleaning import cleaned
from clearhead.data.labeled_tasks import enclose, frame, is_empty
from clearhead.errors import UserError
from clearhead.model import Decoder, Documents, Encoder, EncoderDecoder

if TYPE_CHECKING:
    from clearhead.predict.model import Model

TOKENS = {"cpu": 2048}  # of a batch: enough to keep the device busy, few enough to stay in a CPU's caches
TOKENS_ELSEWHERE = 1 << 16
LONG_TOKEN = 100  # characters: a longer word is unknown to WordPiece
A = TypeVar("A")
Read = Callable[[Tensor, Documents, list[int]], Sequence[A]]


class InvalidText(UserError):
    """A text that cannot be read: which one, and why."""

    def __init__(self, number: int, problem: str):
        super().__init__(f"text {number + 1}: {problem}")
        self.number, self.problem = number, problem


class Row(NamedTuple):
    """The ids of a framed text, and where the second text begins, if there is one."""

    ids: list[int]
    boundary: int


def check_text(number: int, text: str, what: str = "") -> None:
    """Refuse what is no text: another type, or half a character."""
    if not isinstance(text, str):
        raise InvalidText(number, f"{what}{type(text).__name__}, not a string; give some text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start + 1} (U+{ord(text[error.start]):04X}) is half of a surrogate pair"
        raise InvalidText(number, f"{what}{half}; read the text as UTF-8, or replace it") from None


def clean(model: Model, texts: Sequence[str]) -> list[str]:
    """Texts as the training data was made, which is all that the model knows."""
    for number, text in enumerate(texts):
        check_text(number, text)
    return list(texts) if model.data is None else [cleaned(text, model.data) for text in texts]


def limit(model: Model) -> int:
    """Tokens that a text may have with its frame: as many as in training, else as the model has positions."""
    most = model.config.max_positions
    return min(most, model.extra.get("max_length", most) if model.data is None else model.data.max_length)


def rows(model: Model, texts: Sequence[str], seconds: Sequence[str] | None = None, *, cut: bool = False) -> list[Row]:
    """Texts, or pairs of them, as rows; one that is too long is an error, unless it may be `cut`."""
    sides = [model.tokenizer.encode_batch(clean(model, texts))]
    if seconds is not None:
        if len(seconds) != len(texts):
            raise ValueError(f"{len(texts)} texts, but {len(seconds)} second texts")
        sides.append(model.tokenizer.encode_batch(clean(model, seconds)))
    found = []
    for number, parts in enumerate(zip(*sides, strict=True)):
        written = (texts[number], *(() if seconds is None else (seconds[number],)))
        if any(map(is_empty, written, parts)):
            raise InvalidText(number, "empty; give some text")
        check_length(model, number, sum(map(len, parts)), sum(map(len, written)), len(parts), cut)
        found.append(Row(*enclose(model.tokenizer, limit(model), *parts)))
    return found


def check_length(
    model: Model, number: int, tokens: int, characters: int, parts: int = 1, cut: bool | None = False
) -> None:
    """Refuse a text with more tokens than the model reads at once, unless it is cut; None where it cannot be.

    One with few tokens for very many characters has words too long for its tokenizer, which reads nothing of them.
    """
    opens, closes = frame(model.tokenizer)
    room = limit(model) - len(opens) - parts * len(closes)
    fix = "shorten it" + ("" if cut is None else ", or let it be cut")
    if tokens > room and not cut:
        raise InvalidText(number, f"{tokens:,} tokens, but the model reads {room:,}; {fix}")
    if characters > room * LONG_TOKEN and not cut:
        raise InvalidText(number, f"{characters:,} characters, but the model reads {room:,} tokens; {fix}")


def read(model: Model, rows: Sequence[Row], each: Read[A]) -> list[A]:
    """What `each(hidden (1, N, D), documents, rows of the batch)` finds for every row, in order."""
    if not rows:
        return []
    lengths = np.array([len(row.ids) for row in rows])
    order = np.argsort(-lengths, kind="stable")  # the longest first: what memory does not hold shows at once
    most = TOKENS.get(model.device.type, TOKENS_ELSEWHERE)
    batch = np.cumsum(lengths[order]) // most
    found: list[A | None] = [None] * len(rows)
    with torch.inference_mode():
        for number in np.unique(batch):
            chosen = order[batch == number].tolist()
            for place, answer in zip(chosen, each(*_hidden(model, [rows[n] for n in chosen]), chosen), strict=True):
                found[place] = answer
    return cast(list[A], found)


def _hidden(model: Model, rows: Sequence[Row]) -> tuple[Tensor, Documents]:
    """Rows one after the other as hidden states (1, N, D)."""
    documents = Documents.of([len(row.ids) for row in rows], model.device)
    joined = np.fromiter(chain.from_iterable(row.ids for row in rows), np.int64)  # a list takes torch six times as long
    ids = torch.from_numpy(joined)[None].to(model.device)
    network = model.inference_network
    if isinstance(network, Decoder):
        return network.decode(ids, documents=documents), documents
    assert isinstance(network, Encoder)
    segments = None
    if model.config.segments:
        starts = torch.tensor([row.boundary for row in rows], device=model.device)
        segments = (documents.positions >= starts[documents.index]).long()[None]
    return network.encode(ids, documents=documents, segments=segments), documents


def head(model: Model, name: str, act: str, task: str) -> nn.Module:
    """A head of the network; a model without it is an error that says what it was made for."""
    if isinstance(model.network, EncoderDecoder):
        model._as(Encoder, act)
    found = getattr(model.network.heads, name)
    if found is None:
        made = model.extra.get("task") or ("vectors of texts" if "pooling" in model.extra else "something else")
        raise UserError(
            f"{act}: {model.name or 'this model'} was made for {made}, not for {task}; fine-tune it with a recipe of "
            f"data.task={task} and model.init_from={model.name or 'its folder'}"
        )
    return cast(nn.Module, getattr(model.inference_network.heads, name))


def label_names(model: Model, count: int) -> list[str]:
    """The labels in the order of a head's scores; a folder that does not name them numbers them."""
    named = model.extra.get("labels") or []
    return [str(name) for name in named] if len(named) == count else [str(number) for number in range(count)]
