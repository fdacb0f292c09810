"""Routes of attention: all heads as small pictures, one head, one head step by step, one cell, one layer."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, fields
from typing import Any

import torch
from fastapi import APIRouter
from fastapi.responses import Response
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import UserError
from clearhead.interpret.switches import Switch, effect_of
from clearhead.interpret.trace import HeadSteps, Kind, Trace
from clearhead.serve.inspect.explorer import Answer, Exploring, InspectRoute
from clearhead.serve.inspect.requests import CellRequest, HeadRequest, LayerRequest, Request
from clearhead.serve.inspect.texts import ExploredModel, TextTrace

router = APIRouter(route_class=InspectRoute)
THUMBNAIL = 96  # cells of a side; each is the maximum over a block of weights


@router.post("/trace")
async def trace(body: Request, explorer: Exploring) -> Response:
    """Tokens of a text, and the attention of all heads as bytes."""

    def work(explored: ExploredModel) -> Answer:
        start = time.perf_counter()
        text = explored.trace(body)
        kinds = {kind: text.trace.depth(kind) for kind in text.trace.kinds}
        overviews: dict[str, Any] = {}
        for kind in text.trace.kinds:
            overview, patterns = text.trace.overview_and_patterns(kind)
            overviews |= {kind: pooled(overview), f"{kind}_patterns": patterns}
        header = {
            "model": explored.name,
            "source": text.source and text.source.to_dict(),
            "target": text.target and text.target.to_dict(),
            "kinds": kinds,
            "heads": explored.network.config.heads,
            "labels": None if text.labels is None else text.labels.tolist(),
            "loss": text.loss,
            "milliseconds": 1000 * (time.perf_counter() - start),
        }
        return header, overviews

    return await explorer.frame(body.model, work)


def pooled(overview: Tensor) -> Tensor:
    """Maxima over blocks, so that no side has more than THUMBNAIL cells: (L, H, T, S) in uint8."""
    size = max(1, math.ceil(max(overview.shape[2:]) / THUMBNAIL))
    return overview if size == 1 else F.max_pool2d(overview.float(), size, ceil_mode=True).byte()


@router.post("/head")
async def head(body: HeadRequest, explorer: Exploring) -> Response:
    """Attention weights and mask of one head, and what changes when it is switched off."""

    def work(explored: ExploredModel) -> Answer:
        text = explored.trace(body)
        found = text.trace.at(body.kind, body.layer, body.head)
        with torch.no_grad():
            weights = found.heads_and_weights()[1][body.head]
        switch = Switch("head", body.kind, body.layer, body.head)
        effect = effect_of(text.logits, text.without([switch]), text.labels)
        header = {"effect": asdict(effect), "loss": text.loss}
        return header, {"weights": weights, "mask": found.dense_mask()}

    return await explorer.frame(body.model, work)


@router.post("/steps")
async def steps(body: HeadRequest, explorer: Exploring) -> Response:
    """Every intermediate result of one head."""

    def work(explored: ExploredModel) -> Answer:
        text = explored.trace(body)
        result = text.trace.steps(body.kind, body.layer, body.head)
        found = text.trace.at(body.kind, body.layer, body.head).layer
        config = explored.network.config
        header = {
            "head_dim": result.q.shape[-1],
            "heads": found.heads,
            "kv_heads": found.kv_heads,
            "pattern": found.pattern._asdict(),
            "norm_position": config.norm_position,
            "norm": config.norm,
            "rotary": result.q_unrotated is not None,
        }
        return header, {field.name: getattr(result, field.name) for field in fields(HeadSteps)}

    return await explorer.frame(body.model, work)


@router.post("/cell")
async def cell(body: CellRequest, explorer: Exploring) -> Response:
    """The two vectors whose dot product (or sum) is one number of a head."""

    def work(explored: ExploredModel) -> Answer:
        text = explored.trace(body)
        result = text.trace.steps(body.kind, body.layer, body.head)
        return _cell(text.trace, result, body)

    return await explorer.frame(body.model, work)


def _cell(trace: Trace, steps: HeadSteps, body: CellRequest) -> Answer:
    """value = Σ a · b + bias for one cell."""
    layer = trace.at(body.kind, body.layer, body.head).layer
    group = body.head // (layer.heads // layer.kv_heads)
    t, c, size = body.row, body.column, steps.q.shape[-1]
    table = {"q": steps.q_unrotated if steps.q_unrotated is not None else steps.q,
             "k": steps.k_unrotated if steps.k_unrotated is not None else steps.k,
             "rope_q": steps.q, "rope_k": steps.k, "sum": steps.sublayer}.get(body.step)  # fmt: skip
    table = getattr(steps, body.step) if table is None else table
    if t >= table.shape[0] or c >= table.shape[1]:
        raise UserError(f"cell {t}, {c}: {body.step} has {table.shape[0]} rows and {table.shape[1]} columns")
    bias: Tensor | None = None
    one = table.new_ones(1)
    match body.step:
        case "q" | "k" | "v":
            linear = {"q": layer.query, "k": layer.key, "v": layer.value}[body.step]
            column = (body.head if body.step == "q" else group) * size + c
            a, b = (steps.x if body.step == "q" else steps.source)[t], linear.weight[column]
            bias = None if linear.bias is None else linear.bias[column]
        case "rope_q" | "rope_k":  # a pair of dimensions, turned by the angle of its position
            before = steps.q_unrotated if body.step == "rope_q" else steps.k_unrotated
            rope = trace.at(body.kind, body.layer).rope
            if before is None or rope is None:
                raise UserError(f"{body.step}: this model has no rotary positions; choose another step")
            half = size // 2
            cos, sin = (each[0, t, 0, c % half] for each in rope)
            a, b = before[t, [c, (c + half) % size]], torch.stack([cos, -sin if c < half else sin])
        case "scores":
            a, b = steps.q[t], steps.k[c]
        case "scaled":
            a, b = steps.scores[t, c : c + 1], one / math.sqrt(size)
        case "weights":  # the terms of the softmax: exp of each score over their sum
            scores = steps.scaled[t].masked_fill(~steps.mask[t], -math.inf)
            exp = (scores - scores.max()).exp() if bool(steps.mask[t].any()) else scores * 0
            a, b = exp[c : c + 1], one / exp.sum()
        case "output":
            a, b = steps.weights[t], steps.v[:, c]
        case "update":
            a, b = steps.weights[t], steps.value_up[:, c]
        case "sum":  # over the heads
            a = trace.updates(body.kind, body.layer)[:, t, c]
            b = torch.ones_like(a)
            bias = None if layer.output.bias is None else layer.output.bias[c]
    header = {"value": float(table[t, c]), "bias": None if bias is None else float(bias.detach()), "terms": len(a)}
    return header, {"a": a, "b": b}


@router.post("/layer")
async def layer(body: LayerRequest, explorer: Exploring) -> Response:
    """The residual stream through the layers of a stack: lengths (L², norms) of the stream and of what is added."""

    def work(explored: ExploredModel) -> Answer:
        text = explored.trace(body)
        stack: Kind = "encoder" if body.kind == "encoder" else "decoder"
        text.trace.at(body.kind, body.layer)
        layers = [text.trace.layers[stack, number] for number in range(text.trace.depth(stack))]
        rows = {
            "x": [each.x for each in layers],
            "attention": [each.attention for each in layers],
            "cross": [each.cross for each in layers if each.cross is not None],
            "feed_forward": [each.feed_forward for each in layers],
            "output": [each.output for each in layers],
        }
        norms = {name: torch.stack([row.norm(dim=-1) for row in each]) for name, each in rows.items() if each}
        return {"layers": len(layers), "stack": stack}, {**norms, **_feed_forward(text, stack, body.layer)}

    return await explorer.frame(body.model, work)


def _feed_forward(text: TextTrace, stack: Kind, number: int) -> dict[str, Tensor]:
    """Hidden activations (T, F) of a feed-forward layer."""
    module: Any = text.trace.stack(stack).layers[number].feed_forward
    captured: list[Tensor] = []
    handle = module.down.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    try:
        with torch.no_grad():
            module(text.trace.layers[stack, number].feed_forward_input[None])
    finally:
        handle.remove()
    return {"hidden": captured[0][0]}
