"""The words that fit where a text has masks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from clearhead.data.labelled import frame
from clearhead.model import Documents, Encoder
from clearhead.predict.reading import Row, WrongText, check_length, clean, head, read
from clearhead.text.roles import SPELLINGS

if TYPE_CHECKING:
    from clearhead.predict.model import Model

MASK = re.compile("|".join(map(re.escape, SPELLINGS["mask"])))


class Word(NamedTuple):
    """A word that fits, and how probable it is."""

    text: str
    score: float


class Gap(NamedTuple):
    """A mask: its first character in the text, the one behind its last, and the words that fit, best first."""

    first: int
    behind: int
    words: list[Word]


def fill(model: Model, texts: Sequence[str], top: int = 5) -> list[list[Gap]]:
    """For every mask of every text, its `top` words."""
    model._as(Encoder, "fill")
    words = head(model, "words", "fill", "masked-language-model")
    mask = model.tokenizer.id("mask")
    rows = [_row(model, number, text, mask) for number, text in enumerate(texts)]

    def best(hidden: Tensor, documents: Documents, chosen: list[int]) -> list[list[list[Word]]]:
        ids = torch.tensor([token for number in chosen for token in rows[number].ids], device=hidden.device)
        places = (ids == mask).nonzero().squeeze(1)
        scores = words(hidden[0, places]).float().softmax(-1)
        scores[:, list(model.tokenizer.roles.values())] = 0  # nobody asks for [SEP]
        values, numbers = scores[:, : len(model.tokenizer)].topk(min(top, len(model.tokenizer)))
        found: list[list[list[Word]]] = [[] for _ in chosen]
        for row, ours, theirs in zip(documents.index[places].tolist(), numbers.tolist(), values.tolist(), strict=True):
            shown = [model.tokenizer.decode([number]).strip() or model.tokenizer.token(number) for number in ours]
            found[row].append([Word(text, score) for text, score in zip(shown, theirs, strict=True)])
        return found

    found = read(model, rows, best)
    return [
        [Gap(*place.span(), words) for place, words in zip(MASK.finditer(text), several, strict=True)]
        for text, several in zip(texts, found, strict=True)
    ]


def _row(model: Model, number: int, text: str, mask: int) -> Row:
    """The text between its masks, tokenised piece by piece, so that nothing else in it is taken for a special token."""
    pieces = MASK.split(text)
    if not text.strip():
        raise WrongText(number, "empty; give some text")
    if len(pieces) == 1:
        written = model.tokenizer.token(mask)
        raise WrongText(number, f"no mask in it; write {written} where the word is missing")
    if any(token.startswith(("Ġ", "▁")) for token in model.tokenizer.vocabulary):
        pieces[:-1] = [piece.removesuffix(" ") for piece in pieces[:-1]]  # the missing word brings its own space
    encoded = model.tokenizer.encode_all([clean(model, piece) for piece in pieces])
    opens, closes = frame(model.tokenizer)
    inner = encoded[0]
    for piece in encoded[1:]:
        inner = [*inner, mask, *piece]
    check_length(model, number, len(inner), cut=None)
    ids = [*opens, *inner, *closes]
    return Row(ids, len(ids))
