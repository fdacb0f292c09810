"""Texts through an encoder (or a decoder with a head): with special tokens, sorted by length, packed; results in order.

N tokens of a packed batch · D model dim
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.data.cleaning import normalize_text
from clearhead.data.labeled_tasks import add_special_tokens, is_empty, special_prefix_suffix
from clearhead.errors import UserError
from clearhead.limits import MAX_TEXT_CHARS
from clearhead.model import Decoder, Documents, Encoder, EncoderDecoder

if TYPE_CHECKING:
    from clearhead.predict.model import Model

BATCH_TOKENS = {"cpu": 2048}  # per batch: enough to keep the device busy, few enough to stay in a CPU's caches
DEFAULT_BATCH_TOKENS = 1 << 16
LONG_TOKEN = 100  # characters; WordPiece maps a longer word to one unknown token
A = TypeVar("A")
HeadFn = Callable[[Tensor, Documents, list[int]], Sequence[A]]


class InvalidText(UserError):
    """A text that cannot be used: its index and the problem."""

    def __init__(self, number: int, problem: str):
        super().__init__(f"text {number + 1}: {problem}")
        self.number, self.problem = number, problem


class Row(NamedTuple):
    """The ids of a text with special tokens, and where the second text of a pair begins."""

    ids: list[int]
    boundary: int


def check_text(number: int, text: str, what: str = "") -> None:
    """Refuse other types, and strings with half of a surrogate pair."""
    if not isinstance(text, str):
        raise InvalidText(number, f"{what}{type(text).__name__}, not a string; give some text")
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidText(number, f"{what}{len(text):,} characters; at most {MAX_TEXT_CHARS:,} are tokenized at once")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start + 1} (U+{ord(text[error.start]):04X}) is half of a surrogate pair"
        raise InvalidText(number, f"{what}{half}; read the text as UTF-8, or replace it") from None


def normalize_texts(model: Model, texts: Sequence[str]) -> list[str]:
    """Normalize texts as the training data was."""
    for number, text in enumerate(texts):
        check_text(number, text)
    return list(texts) if model.data is None else [normalize_text(text, model.data) for text in texts]


def max_length(model: Model) -> int:
    """Maximum tokens of a text with special tokens: data.max_length of training, else the model's positions."""
    positions = model.config.max_positions
    return min(positions, model.extra.get("max_length", positions) if model.data is None else model.data.max_length)


def rows(
    model: Model, texts: Sequence[str], text_pairs: Sequence[str] | None = None, *, truncate: bool = False
) -> list[Row]:
    """Texts, or pairs of texts, as ids with special tokens; one that is too long is an error unless `truncate`."""
    sides = [model.tokenizer.encode_batch(normalize_texts(model, texts))]
    if text_pairs is not None:
        if len(text_pairs) != len(texts):
            raise UserError(f"{len(texts)} texts, but {len(text_pairs)} second texts; give one for each")
        sides.append(model.tokenizer.encode_batch(normalize_texts(model, text_pairs)))
    results = []
    for number, parts in enumerate(zip(*sides, strict=True)):
        strings = (texts[number], *(() if text_pairs is None else (text_pairs[number],)))
        if any(map(is_empty, strings, parts)):
            raise InvalidText(number, "empty; give some text")
        check_length(model, number, sum(map(len, parts)), sum(map(len, strings)), len(parts), truncate)
        results.append(Row(*add_special_tokens(model.tokenizer, max_length(model), *parts)))
    return results


def check_length(
    model: Model, number: int, tokens: int, characters: int, parts: int = 1, truncate: bool | None = False
) -> None:
    """Refuse a text that is longer than the model reads, unless it may be truncated; None where that is no option.

    Few tokens for very many characters mean words too long for the tokenizer, which become one unknown token each.
    """
    opens, closes = special_prefix_suffix(model.tokenizer)
    tokens_between = len(closes) * model.tokenizer.separators_in_pair * (parts - 1)
    room = max_length(model) - len(opens) - len(closes) - tokens_between
    fix = "shorten it" + ("" if truncate is None else ", or use truncate=True")
    if tokens > room and not truncate:
        raise InvalidText(number, f"{tokens:,} tokens, but the model reads {room:,}; {fix}")
    if characters > room * LONG_TOKEN and not truncate:
        raise InvalidText(number, f"{characters:,} characters, but the model reads {room:,} tokens; {fix}")


def encode_packed(model: Model, rows: Sequence[Row], head_fn: HeadFn[A]) -> list[A]:
    """Apply `head_fn(hidden (1, N, D), documents, row numbers)` to packed batches; one result per row, in order."""
    if not rows:
        return []
    lengths = np.array([len(row.ids) for row in rows])
    order = np.argsort(-lengths, kind="stable")  # longest first: running out of memory shows at once
    batch_tokens = BATCH_TOKENS.get(model.device.type, DEFAULT_BATCH_TOKENS)
    batches = np.cumsum(lengths[order]) // batch_tokens
    results: list[A | None] = [None] * len(rows)
    with torch.inference_mode():
        for batch in np.unique(batches):
            numbers = order[batches == batch].tolist()
            outputs = head_fn(*_hidden(model, [rows[n] for n in numbers]), numbers)
            for number, output in zip(numbers, outputs, strict=True):
                results[number] = output
    return cast(list[A], results)


def _hidden(model: Model, rows: Sequence[Row]) -> tuple[Tensor, Documents]:
    """Packed rows as hidden states (1, N, D)."""
    documents = Documents.from_lengths([len(row.ids) for row in rows], model.device)
    packed = np.fromiter(chain.from_iterable(row.ids for row in rows), np.int64)  # six times faster than from a list
    ids = torch.from_numpy(packed)[None].to(model.device)
    network = model.inference_network
    if isinstance(network, Decoder):
        return network.decode(ids, documents=documents), documents
    assert isinstance(network, Encoder)
    segments = None
    if model.config.segments > 1:
        starts = torch.tensor([row.boundary for row in rows], device=model.device)
        segments = (documents.positions >= starts[documents.index]).long()[None]
    return network.encode(ids, documents=documents, segments=segments), documents


def get_head(model: Model, name: str, command: str, task: str) -> nn.Module:
    """Return a head of the inference network; a model without it is an error that names what it was trained for."""
    if isinstance(model.network, EncoderDecoder):
        model.inference_network_for(Encoder, command)
    if getattr(model.network.heads, name) is None:
        trained = model.extra.get("task") or ("sentence vectors" if "pooling" in model.extra else "something else")
        raise UserError(
            f"{command}: {model.label} was trained for {trained}, not for {task}; fine-tune it with a recipe of "
            f"data.task={task} and model.init_from={model.name or 'its folder'}"
        )
    return cast(nn.Module, getattr(model.inference_network.heads, name))


def label_names(model: Model, count: int) -> list[str]:
    """Label names in the order of the head's logits; numbers where config.json has no names."""
    named = model.extra.get("labels") or []
    return [str(name) for name in named] if len(named) == count else [str(number) for number in range(count)]
