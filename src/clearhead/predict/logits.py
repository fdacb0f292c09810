"""`Model.logits`: check token ids that a user wrote, then run the reference network.

B batch · T tokens · V vocabulary
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.errors import UserError
from clearhead.model import EncoderDecoder

if TYPE_CHECKING:
    from clearhead.predict.model import Model


def logits(model: Model, ids: Any, target_ids: Any = None) -> Tensor:
    """Logits (B, T, V) for ids (B, T); a translator's are for its target ids."""
    config = model.config
    source = _checked("ids", ids, config.source_vocab, config.max_positions)
    if model.network.heads.lm_head is None:
        raise UserError(f"logits: {model.label} has no lm_head; use a model that was trained to predict tokens")
    with torch.inference_mode():
        if not isinstance(model.network, EncoderDecoder):
            if target_ids is not None:
                raise UserError(
                    f"target_ids: {model.label} is {model.kind}, which reads ids only; leave target_ids out"
                )
            return model.network(source.to(model.device))
        if target_ids is None:
            raise UserError("logits: a translator needs target_ids, too; give the decoder's input")
        target = _checked("target_ids", target_ids, config.target_vocab, config.max_positions)
        if len(source) != len(target):
            raise UserError(f"target_ids: {len(target)} rows, but ids have {len(source)}; give equally many")
        return model.network(source.to(model.device), target.to(model.device))


def _checked(name: str, ids: Any, vocab: int, positions: int) -> Tensor:
    """Return ids of shape (B, T) as int64; refuse what the network cannot read."""
    if not isinstance(ids, Tensor):
        raise UserError(f"logits: {type(ids).__name__} is not a tensor; give ids as torch.tensor([[…]])")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"{name}: {str(ids.dtype).removeprefix('torch.')} is not a type of token ids; use int64")
    if ids.dim() != 2 or not ids.numel():
        raise UserError(
            f"{name}: shape {tuple(ids.shape)}; give rows of at least one token, like torch.tensor([[1, 2]])"
        )
    if ids.shape[1] > positions:
        raise UserError(f"{name}: {ids.shape[1]:,} tokens, but the model has {positions:,} positions; shorten the rows")
    ids = ids.long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise UserError(f"{name}: token {wrong} is outside the vocabulary; give ids from 0 to {vocab - 1}")
    return ids
