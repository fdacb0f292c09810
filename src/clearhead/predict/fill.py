"""Tokens for the masks of a text (masked language models)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.data.labeled_tasks import special_prefix_suffix
from clearhead.model import Documents, Encoder
from clearhead.predict.check_arguments import check_number
from clearhead.predict.encode_batch import (
    InvalidText,
    Row,
    check_length,
    check_text,
    encode_packed,
    get_head,
    normalize_texts,
)
from clearhead.predict.results import MaskFill, MaskPrediction, MaskToken
from clearhead.text import Tokenizer
from clearhead.text.roles import SPELLINGS

if TYPE_CHECKING:
    from clearhead.predict.model import Model

MASK = re.compile("|".join(map(re.escape, SPELLINGS["mask"])))


def fill(model: Model, texts: Sequence[str], top: int = 5) -> list[MaskFill]:
    """The `top` tokens for every mask of every text."""
    model.inference_network_for(Encoder, "fill")
    check_number("top", top, 1)
    lm_head = get_head(model, "lm_head", "fill", "masked-language-model")
    mask_id, roles = model.tokenizer.id("mask"), set(model.tokenizer.roles.values())
    rows = masked_rows(model, texts)
    vocab = sorted(set(model.tokenizer.vocabulary.values()) - roles)  # special tokens are never proposed

    def predict(hidden: Tensor, documents: Documents, numbers: list[int]) -> list[list[tuple[MaskToken, ...]]]:
        ids = torch.tensor([token for number in numbers for token in rows[number].ids], device=hidden.device)
        positions = (ids == mask_id).nonzero().squeeze(1)
        probs = lm_head(hidden[0, positions]).float().softmax(-1)
        values, best = probs[:, vocab].topk(min(top, len(vocab)))
        results: list[list[tuple[MaskToken, ...]]] = [[] for _ in numbers]
        row_of_mask = documents.index[positions].tolist()
        for row, columns, scores in zip(row_of_mask, best.tolist(), values.tolist(), strict=True):
            tokens = [_shown(model.tokenizer, vocab[column]) for column in columns]
            results[row].append(tuple(MaskToken(*pair) for pair in zip(tokens, scores, strict=True)))
        return results

    results = []
    for text, filled in zip(texts, encode_packed(model, rows, predict), strict=True):
        spans = [match.span() for match in MASK.finditer(text)]
        masks = tuple(MaskPrediction(*span, tokens) for span, tokens in zip(spans, filled, strict=True))
        for mask in reversed(masks):
            best = mask.tokens[0].text if mask.tokens else text[mask.start : mask.end]
            text = text[: mask.start] + best + text[mask.end :]
        results.append(MaskFill(text, masks))
    return results


def _shown(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token]).strip() or tokenizer.id_to_token(token)


def masked_rows(model: Model, texts: Sequence[str]) -> list[Row]:
    """Tokenize texts between their masks, so that nothing else in them is read as a special token."""
    tokenizer, mask_id, bare_space = model.tokenizer, model.tokenizer.id("mask"), model.tokenizer.vocabulary.get("▁")
    token_has_space = any(token.startswith(("Ġ", "▁")) for token in tokenizer.vocabulary)
    opens, closes = special_prefix_suffix(tokenizer)
    rows = []
    for number, text in enumerate(texts):
        check_text(number, text)
        pieces = MASK.split(text)
        if not text.strip():
            raise InvalidText(number, "empty; give some text")
        if len(pieces) == 1:
            raise InvalidText(
                number, f"no mask in it; write {tokenizer.id_to_token(mask_id)} where the word is missing"
            )
        if token_has_space:
            pieces[:-1] = [piece.removesuffix(" ") for piece in pieces[:-1]]
        first, *others = tokenizer.encode_batch(normalize_texts(model, pieces))
        ids = [*opens, *first]
        for piece, inner in zip(pieces[1:], others, strict=True):
            added_space = inner[:1] == [bare_space] and not piece.startswith(" ")  # put there by the tokenizer
            ids += [mask_id, *inner[added_space:]]
        check_length(model, number, len(ids) - len(opens), len(text), truncate=None)
        rows.append(Row([*ids, *closes], len(ids) + len(closes)))
    return rows
