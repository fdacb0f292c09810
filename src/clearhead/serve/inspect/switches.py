"""Routes of ablation: the output without some parts, and the effect of every part, one at a time."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
from fastapi import APIRouter
from fastapi.responses import Response
from torch import Tensor

from clearhead.interpret.beam_tree import greedy, logits_of
from clearhead.interpret.switches import all_heads, all_parts, effect_of, switched_off
from clearhead.model import Encoder
from clearhead.serve.inspect.explorer import Answer, Exploring, InspectRoute
from clearhead.serve.inspect.requests import EffectsRequest, SwitchRequest
from clearhead.serve.inspect.texts import ExploredModel, TextTrace

router = APIRouter(route_class=InspectRoute)
NEW_TOKENS = 16  # of the text that is generated with and without the parts
BEST = 5
MAX_SECONDS = 20.0  # for the effects of all parts; what is not done by then is left out


@router.post("/switch")
async def switch(body: SwitchRequest, explorer: Exploring) -> Response:
    """Predictions, loss and a greedy text with some parts off, beside those of the whole model."""

    def work(explored: ExploredModel) -> Answer:
        text = explored.trace(body)
        off = [each.switch() for each in body.off]
        ablated = text.without(off)
        labels = [] if text.labels is None else text.labels.tolist()
        written = _written(explored, text)
        with switched_off(explored.network, off):
            written_off = _written(explored, text)
        header = {
            "effect": asdict(effect_of(text.logits, ablated, text.labels)),
            "loss": text.loss,
            "written": written,
            "written_off": written_off,
            "before": _best(explored, text.logits),
            "after": _best(explored, ablated),
            "labels": None if text.labels is None else text.labels.tolist(),
            "label_texts": [explored.show(each) if each >= 0 else "" for each in labels],
        }
        return header, {"before": _label_probs(text, text.logits), "after": _label_probs(text, ablated)}

    return await explorer.frame(body.model, work)


def _written(explored: ExploredModel, text: TextTrace) -> str | None:
    """A greedy continuation of a prompt, or the greedy translation; encoders write nothing."""
    model, network = explored.model, explored.network
    if isinstance(network, Encoder):
        return None
    prompt = text.last.ids[:1] if text.source else text.last.ids
    steps = min(len(text.last.ids) + 8 if text.source else NEW_TOKENS, model.config.max_positions - len(prompt))
    with torch.no_grad():
        ids = greedy(logits_of(network, text.trace.source), prompt, model.special_tokens.eos_ids, steps, model.device)
    return explored.tokenizer.decode(ids)


def _best(explored: ExploredModel, logits: Tensor) -> list[dict[str, Any]]:
    """The most likely tokens (or labels) of every row."""
    values, ids = logits.float().softmax(-1).topk(min(BEST, logits.shape[-1]))
    name = names_of(explored)
    return [
        {"ids": row, "texts": [name(each) for each in row], "probs": probs}
        for row, probs in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def names_of(explored: ExploredModel) -> Any:
    """What an output number stands for: a token, else a label, else a position."""
    if explored.network.heads.lm_head is not None:
        return explored.show
    labels = explored.model.extra.get("labels") or []
    return lambda number: str(labels[number]) if number < len(labels) else str(number)


def _label_probs(text: TextTrace, logits: Tensor) -> Tensor | None:
    """The probability of each token that came next (T,); 0 where none did."""
    if text.labels is None:
        return None
    probs = logits.float().softmax(-1).gather(-1, text.labels.clamp(min=0)[:, None])[:, 0]
    return probs * (text.labels >= 0)


@router.post("/effects")
async def effects(body: EffectsRequest, explorer: Exploring) -> Response:
    """The effect of each head, or of each sublayer, layer, position encoding and mask, largest first.

    The page asks for the heads of one layer at a time, so that other requests are answered in between.
    """

    def work(explored: ExploredModel) -> Answer:
        text = explored.trace(body)
        parts = all_heads(explored.network) if body.group == "heads" else all_parts(explored.network)
        parts = [each for each in parts if body.kind in (None, each.stack) and body.layer in (None, each.layer)]
        start, found = time.monotonic(), []
        for part in parts:
            if time.monotonic() - start > MAX_SECONDS:
                break
            found.append({**asdict(part), **asdict(effect_of(text.logits, text.without([part]), text.labels))})
        found.sort(key=lambda each: -each["divergence"])
        return {"effects": found, "of": len(parts), "loss": text.loss}, {}

    return await explorer.frame(body.model, work)
