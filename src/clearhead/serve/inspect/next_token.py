"""The route of the next token: all logits at a position, the logit lens by layer, and the KV cache."""

from __future__ import annotations

from typing import Any

import torch
from fastapi import APIRouter
from fastapi.responses import Response

from clearhead.errors import UserError
from clearhead.model.cost import cache_bytes, flops_per_token
from clearhead.serve.inspect.explorer import Answer, Exploring, InspectRoute
from clearhead.serve.inspect.requests import PositionRequest
from clearhead.serve.inspect.texts import ExploredModel, TextTrace

router = APIRouter(route_class=InspectRoute)
NAMED, LENS_TOKENS = 512, 5  # candidates with their texts; candidates of each layer


@router.post("/next")
async def next_token(body: PositionRequest, explorer: Exploring) -> Response:
    """Logits after a position, most likely tokens with their texts, the lens, and what the KV cache holds."""

    def work(explored: ExploredModel) -> Answer:
        text = explored.trace(body)
        if text.trace.network.heads.lm_head is None or explored.model.config.family == "encoder":
            raise UserError("next: this model does not predict a next token; use another view")
        position = len(text.last.ids) - 1 if body.position is None else body.position
        if position >= len(text.last.ids):
            raise UserError(f"position: {position}, but the text has {len(text.last.ids)} tokens, counted from 0")
        logits = text.logits[position]
        best = logits.topk(min(NAMED, len(logits))).indices.tolist()
        header = {
            "position": position,
            "ids": best,
            "texts": [explored.show(token) for token in best],
            "eos": [token for token in explored.model.special_tokens.eos_ids if token < len(logits)],
            "lens": _lens(explored, text, position),
            "cache": cache_of(explored, text, position + 1),
        }
        return header, {"logits": logits}

    return await explorer.frame(body.model, work)


def _lens(explored: ExploredModel, text: TextTrace, position: int) -> list[dict[str, Any]]:
    """The most likely tokens after each layer."""
    result = []
    for logits in text.trace.lens() or []:
        values, ids = logits[position].float().log_softmax(-1).topk(min(LENS_TOKENS, logits.shape[-1]))
        texts = [explored.show(token) for token in ids.tolist()]
        result.append({"ids": ids.tolist(), "texts": texts, "logprobs": values.tolist()})
    return result


def cache_of(explored: ExploredModel, text: TextTrace, tokens: int) -> dict[str, Any]:
    """Size of the KV cache at this position, and what it saves in the next step."""
    config, dtype = explored.model.config, next(explored.network.parameters()).dtype
    source = len(text.source.ids) if text.source else 0
    own = cache_bytes(config, tokens, dtype)
    cross = cache_bytes(config, source, dtype) if config.family == "encoder-decoder" else 0
    multi_head = (own + cross) * config.heads // config.kv_heads
    with torch.device("meta"):
        step = flops_per_token(explored.network, tokens)
    return {
        "layers": config.decoder_layers,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "tokens": tokens,
        "source_tokens": source,
        "number_bytes": dtype.itemsize,
        "bytes": own,
        "cross_bytes": cross,
        "multi_head_bytes": multi_head,
        "step_flops": step,
        "uncached_flops": sum(flops_per_token(explored.network, each) for each in range(1, tokens + 1)),
    }
