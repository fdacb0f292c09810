"""Routes of tokens: spellings and bytes, neighbors in the embedding, position encodings, a word in several contexts."""

from __future__ import annotations

from typing import Any

import torch
from fastapi import APIRouter
from fastapi.responses import Response
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import UserError
from clearhead.model.positions import rope_cos_sin, sinusoidal_positions
from clearhead.serve.inspect.explorer import Answer, Exploring, InspectRoute
from clearhead.serve.inspect.requests import ContextRequest, LayerRequest, NeighborsRequest, Request
from clearhead.serve.inspect.texts import ExploredModel, Side, TextTrace, byte_spelling, spelled

router = APIRouter(route_class=InspectRoute)
MAX_SHOWN_POSITIONS = 128


@router.post("/tokens")
async def tokens(body: Request, explorer: Exploring) -> Response:
    """The vocabulary's spelling of every token, and the bytes where the vocabulary is one of bytes."""

    def work(explored: ExploredModel) -> Answer:
        text = explored.trace(body)
        own = explored.model.tokenizers
        sides = {"source": (text.source, own[0]), "target": (text.target, own[-1])}
        header: dict[str, Any] = {
            name: side and {"spellings": [tokenizer.id_to_token(each) for each in side.ids], "bytes": [
                _bytes(tokenizer.id_to_token(each), each in tokenizer.roles.values()) for each in side.ids]}
            for name, (side, tokenizer) in sides.items()
        }  # fmt: skip
        return {**header, "vocabulary": {name: len(tokenizer) for name, (_, tokenizer) in sides.items()}}, {}

    return await explorer.frame(body.model, work)


def _bytes(spelling: str, special: bool) -> list[int] | None:
    """The bytes of a byte-level spelling, or of <0x41>; None for special tokens."""
    if special:
        return None
    data = byte_spelling(spelling)
    if data is not None:
        return data
    return list(spelling.encode("utf-8", "replace"))


@router.post("/neighbors")
async def neighbors(body: NeighborsRequest, explorer: Exploring) -> Response:
    """The tokens whose embeddings have the highest cosine similarity with that of a token."""

    def work(explored: ExploredModel) -> Answer:
        text = explored.trace(body)
        side = text.source if body.side == "source" else text.target
        if side is None or body.position >= len(side.ids):
            raise UserError(f"position: there is no token {body.position} in the {body.side}")
        network = explored.network
        stack = network.encoder if body.side == "source" else network.decoder
        matrix = stack.embedding.tokens.weight.detach().float()
        token = side.ids[body.position]
        similarity = F.cosine_similarity(matrix, matrix[token][None], dim=-1)
        similarity[token] = -2
        values, ids = similarity.topk(min(body.count, len(matrix) - 1))
        tokenizer = explored.model.tokenizers[0 if body.side == "source" else -1]
        names = [spelled(tokenizer, each) if each < len(tokenizer) else "" for each in ids.tolist()]
        return {"token": token, "ids": ids.tolist(), "texts": names, "similarities": values.tolist()}, {}

    return await explorer.frame(body.model, work)


@router.post("/positions")
async def positions(body: LayerRequest, explorer: Exploring) -> Response:
    """Position encodings of a stack: the vectors that are added (T, D), or the cosines of rotary angles (T, E/2)."""

    def work(explored: ExploredModel) -> Answer:
        text = explored.trace(body)
        config = explored.model.config
        stack = text.trace.stack(body.kind)
        text.trace.at(body.kind, 0)
        count = min(config.max_positions, MAX_SHOWN_POSITIONS)
        index = torch.arange(count, device=explored.model.device)[None] + config.position_offset
        table: Tensor | None = None
        with torch.no_grad():
            if config.position == "sinusoidal":
                table = sinusoidal_positions(index, config.dim, config.sinusoid)[0]
            elif config.position == "learned":
                table = stack.embedding.positions(index)[0]
            elif config.position == "rotary":
                table = rope_cos_sin(config, index)[0][0, :, 0]
        return {"position": config.position}, {"table": table}

    return await explorer.frame(body.model, work)


@router.post("/context")
async def context(body: ContextRequest, explorer: Exploring) -> Response:
    """One word in several texts: its static and contextual vectors in two dimensions, and their cosines."""

    def work(explored: ExploredModel) -> Answer:
        static, contextual, found = [], [], []
        for number, text in enumerate([body.text, *body.others]):
            if not text.strip():
                continue
            trace = explored.trace(Request(model=body.model, text=text, target="" if _translates(explored) else None))
            side = trace.source or trace.last
            positions = _positions_of(side, body.word)
            if not positions:
                continue
            stack, hidden = _hidden(trace, body.layer)
            ids = torch.tensor([side.ids[each] for each in positions], device=hidden.device)
            static.append(stack.embedding.tokens(ids).detach().float().mean(0))
            contextual.append(hidden[positions].float().mean(0))
            found.append({"text": number, "positions": positions})
        if not found:
            raise UserError(f"word: {body.word!r} is in none of the texts; write one that contains it")
        vectors = torch.stack(contextual)
        rows = F.normalize(vectors, dim=-1)
        fixed = F.normalize(torch.stack(static), dim=-1)
        tensors = {"points": project(vectors), "cosines": rows @ rows.T}
        tensors |= {"static_points": project(torch.stack(static)), "static_cosines": fixed @ fixed.T}
        return {"found": found}, tensors

    return await explorer.frame(body.model, work)


def _translates(explored: ExploredModel) -> bool:
    return explored.model.config.family == "encoder-decoder"


def _positions_of(side: Side, word: str) -> list[int]:
    """The tokens of the first occurrence of a word, whatever its case."""
    start = side.texts[0].lower().find(word.lower())
    if start < 0:
        return []
    end = start + len(word)
    spans = enumerate(side.spans)
    return [n for n, span in spans if span and span[0] == 0 and span[1] < end and span[2] > start]


def _hidden(text: TextTrace, layer: int | None) -> tuple[Any, Tensor]:
    """The stack that reads the text, and its hidden states after a layer, the last by default."""
    kind = text.trace.kinds[0]
    depth = text.trace.depth(kind)
    if layer is not None and layer >= depth:
        raise UserError(f"layer: {layer}, but there are {depth}, counted from 0")
    return text.trace.stack(kind), text.trace.layers[kind, depth - 1 if layer is None else layer].output


def project(vectors: Tensor) -> Tensor:
    """The first two principal components: (N, D) to (N, 2); the sign is that of the largest coordinate."""
    centered = vectors - vectors.mean(0)
    u, s, _ = torch.linalg.svd(centered, full_matrices=False)
    points = F.pad(u * s, (0, 2))[:, :2]
    largest = points.gather(0, points.abs().argmax(0, keepdim=True))
    return points * torch.where(largest < 0, -1.0, 1.0)
