"""The route of encoders: masks, classes, tags or spans, what each token contributes, and the attention of [CLS]."""

from __future__ import annotations

from typing import Any

import torch
from fastapi import APIRouter
from fastapi.responses import Response
from torch import Tensor

from clearhead.errors import UserError
from clearhead.interpret.trace import read_out, run_network
from clearhead.model import Encoder
from clearhead.serve.inspect.explorer import Answer, Exploring, InspectRoute
from clearhead.serve.inspect.requests import Request
from clearhead.serve.inspect.switches import names_of
from clearhead.serve.inspect.texts import ExploredModel, TextTrace

router = APIRouter(route_class=InspectRoute)
BEST, MAX_OCCLUDED = 10, 256


@router.post("/understand")
async def understand(body: Request, explorer: Exploring) -> Response:
    """The predictions of an encoder; `drops` (N, T) are logprobs lost when a token is hidden, for each prediction."""

    def work(explored: ExploredModel) -> Answer:
        if not isinstance(explored.network, Encoder):
            raise UserError("understand: this model is no encoder; use another view")
        text = explored.trace(body)
        task, rows = _rows(explored, text)
        logits = text.logits[rows].float() if rows else text.logits[:0].float()
        probs = logits.softmax(-1)
        values, ids = probs.topk(min(BEST, probs.shape[-1]))
        name = names_of(explored)
        predictions = [
            {"row": row, "ids": best, "texts": [name(each) for each in best], "probs": scores}
            for row, best, scores in zip(rows, ids.tolist(), values.tolist(), strict=True)
        ]
        cls = torch.stack([text.trace.at("encoder", layer).heads_and_weights()[1][:, 0].detach()
                           for layer in range(text.trace.depth("encoder"))])  # fmt: skip
        header = {"task": task, "predictions": predictions, "hidden_token": _hidden_token(explored)}
        return header, {"cls": cls, "drops": logprob_drops(explored, text, rows, ids[:, 0] if rows else None)}

    return await explorer.frame(body.model, work)


def _rows(explored: ExploredModel, text: TextTrace) -> tuple[str, list[int]]:
    """The task of the model, and the rows of its logits that are predictions."""
    heads, ids = explored.network.heads, text.last.ids
    if heads.lm_head is not None:
        mask = explored.tokenizer.roles.get("mask")
        return "fill", [position for position, token in enumerate(ids) if token == mask]
    if heads.tags is not None:
        return "tag", [position for position, span in enumerate(text.last.spans) if span is not None]
    if heads.classes is not None:
        return "classify", [0]
    if heads.span is not None:
        return "answer", [0, 1]
    return "embed", []


def _hidden_token(explored: ExploredModel) -> str:
    roles = explored.tokenizer.roles
    return next((role for role in ("mask", "unknown", "padding") if role in roles), "")


def logprob_drops(explored: ExploredModel, text: TextTrace, rows: list[int], best: Tensor | None) -> Tensor | None:
    """Occlusion: the logprob of each prediction with all tokens, minus that with token t replaced: (N, T)."""
    roles: dict[Any, int] = explored.tokenizer.roles
    replacement = roles.get(_hidden_token(explored))
    source = text.trace.source
    if best is None or replacement is None or source is None or source.shape[1] > MAX_OCCLUDED:
        return None
    segments = None if text.segments is None else torch.tensor([text.segments], device=source.device)
    network = explored.network

    def logprobs(ids: Tensor) -> Tensor:
        logits = read_out(network, run_network(network, ids, None, segments)[0])
        return logits[rows].float().log_softmax(-1).gather(1, best[:, None])[:, 0]

    with torch.no_grad():
        before, drops = logprobs(source), []
        for position, span in enumerate(text.last.spans):
            hidden = source.clone()
            hidden[0, position] = replacement
            unchanged = span is None or int(source[0, position]) == replacement
            drops.append(before * 0 if unchanged else before - logprobs(hidden))
    return torch.stack(drops, dim=1)
