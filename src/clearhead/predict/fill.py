"""The words that fit where a text has masks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from clearhead.data.labeled_tasks import frame
from clearhead.model import Documents, Encoder
from clearhead.predict.encode_batch import InvalidText, Row, check_length, check_text, clean, head, read
from clearhead.text import Tokenizer
from clearhead.text.roles import SPELLINGS

if TYPE_CHECKING:
    from clearhead.predict.model import Model

MASK = re.compile("|".join(map(re.escape, SPELLINGS["mask"])))


class Word(NamedTuple):
    """A word that fits, and how probable it is."""

    text: str
    score: float


class MaskFill(NamedTuple):
    """A mask: its first character in the text, the one behind its last, and the words that fit, best first."""

    start: int
    end: int
    words: list[Word]


def fill(model: Model, texts: Sequence[str], top: int = 5) -> list[list[MaskFill]]:
    """For every mask of every text, its `top` words."""
    model._as(Encoder, "fill")
    words = head(model, "lm", "fill", "masked-language-model")
    mask, roles = model.tokenizer.id("mask"), set(model.tokenizer.roles.values())
    rows = _rows(model, texts, mask)
    known = sorted(set(model.tokenizer.vocabulary.values()) - roles)  # nobody asks for [SEP]

    def each(hidden: Tensor, documents: Documents, chosen: list[int]) -> list[list[list[Word]]]:
        ids = torch.tensor([token for number in chosen for token in rows[number].ids], device=hidden.device)
        places = (ids == mask).nonzero().squeeze(1)
        scores = words(hidden[0, places]).float().softmax(-1)
        values, best = scores[:, known].topk(min(top, len(known)))
        found: list[list[list[Word]]] = [[] for _ in chosen]
        for row, ours, theirs in zip(documents.index[places].tolist(), best.tolist(), values.tolist(), strict=True):
            shown = [_shown(model.tokenizer, known[place]) for place in ours]
            found[row].append([Word(text, score) for text, score in zip(shown, theirs, strict=True)])
        return found

    found = read(model, rows, each)
    return [
        [MaskFill(*place.span(), words) for place, words in zip(MASK.finditer(text), several, strict=True)]
        for text, several in zip(texts, found, strict=True)
    ]


def _shown(tokenizer: Tokenizer, number: int) -> str:
    return tokenizer.decode([number]).strip() or tokenizer.token(number)


def _rows(model: Model, texts: Sequence[str], mask: int) -> list[Row]:
    """Texts tokenized between their masks, so that nothing else in them is taken for a special token."""
    tokenizer, alone = model.tokenizer, model.tokenizer.vocabulary.get("▁")
    brings_space = any(token.startswith(("Ġ", "▁")) for token in tokenizer.vocabulary)  # the missing word, its own
    opens, closes = frame(tokenizer)
    rows = []
    for number, text in enumerate(texts):
        check_text(number, text)
        pieces = MASK.split(text)
        if not text.strip():
            raise InvalidText(number, "empty; give some text")
        if len(pieces) == 1:
            raise InvalidText(number, f"no mask in it; write {tokenizer.token(mask)} where the word is missing")
        if brings_space:
            pieces[:-1] = [piece.removesuffix(" ") for piece in pieces[:-1]]
        first, *others = tokenizer.encode_batch(clean(model, pieces))
        ids = [*opens, *first]
        for piece, inner in zip(pieces[1:], others, strict=True):
            begun = inner[:1] == [alone] and not piece.startswith(" ")  # a space that only the tokenizer put there
            ids += [mask, *inner[begun:]]
        check_length(model, number, len(ids) - len(opens), len(text), cut=None)
        rows.append(Row([*ids, *closes], len(ids) + len(closes)))
    return rows
