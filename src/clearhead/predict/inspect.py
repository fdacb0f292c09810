"""Texts to an Inspection: what the encoder and the decoder of a model read, and what happens inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from clearhead.errors import UserError
from clearhead.interpret import Inspection, Tokens, inspect_network
from clearhead.model import Decoder, EncoderDecoder
from clearhead.predict.check_arguments import check_number, check_string
from clearhead.predict.encode_batch import Row, check_text, rows
from clearhead.predict.engines import reference_network
from clearhead.predict.export import require_unquantized
from clearhead.predict.fill import MASK, masked_rows
from clearhead.predict.requests import requests
from clearhead.text import Tokenizer

if TYPE_CHECKING:
    from clearhead.predict.model import Model


def inspect_text(model: Model, text: str, target: str | None = None, top: int = 5) -> Inspection:
    """Inspect one pass of the reference network over a text (and a target)."""
    check_number("top", top, 1)
    if target is not None:
        check_string("target", target)
    check_text(0, text)
    require_unquantized(model, "inspect")
    network, tokenizer = reference_network(model), model.tokenizers[-1]

    def show(token: int) -> str:
        return shown(tokenizer, token)

    if isinstance(network, EncoderDecoder):
        if target is None:
            target = model.translate(text).text
        [(prompt, source, _)] = requests(model, [text], {}, [target])
        if not source:
            raise UserError("inspect: the text is empty; give some text")
        return inspect_network(network, _tokens(model.tokenizer, source), _tokens(tokenizer, prompt), show, top=top)
    if isinstance(network, Decoder):
        if target is not None:
            raise UserError("target: a decoder reads one text; leave the target out")
        ids = model.prompt_ids(text)
        if not 0 < len(ids) <= model.config.max_positions:
            problem = f"{len(ids):,} tokens, but the model reads 1 to {model.config.max_positions:,}"
            raise UserError(f"inspect: {problem}; give a text of that length")
        return inspect_network(network, None, _tokens(tokenizer, ids), show, top=top)
    row = _row(model, text, target)
    segments = None
    if model.config.segments > 1:
        segments = (torch.arange(len(row.ids), device=model.device) >= row.boundary).long()[None]
    return inspect_network(network, _tokens(tokenizer, row.ids), None, show, top=top, segments=segments)


def _row(model: Model, text: str, second: str | None) -> Row:
    """The ids of a text with special tokens, whose masks count as such, or of a pair."""
    if second is None and _has_masks(model) and MASK.search(text):
        return masked_rows(model, [text])[0]
    return rows(model, [text], None if second is None else [second])[0]


def _has_masks(model: Model) -> bool:
    """Whether the model has an lm_head and a mask token."""
    return model.network.heads.lm_head is not None and "mask" in model.tokenizer.roles


def _tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> Tokens:
    return Tokens(tuple(ids), tuple(shown(tokenizer, token) for token in ids))


def shown(tokenizer: Tokenizer, token: int) -> str:
    """A token as a reader sees it: its text, else (part of a character, special token) as the vocabulary writes it."""
    text = tokenizer.decode([token])
    return text if text.strip() and "\N{REPLACEMENT CHARACTER}" not in text else tokenizer.id_to_token(token)
