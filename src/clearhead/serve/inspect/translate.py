"""Routes of translation: alignment, the tree of a beam search, teacher-forced against free-running."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from fastapi import APIRouter
from fastapi.responses import Response
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import UserError
from clearhead.interpret.beam_tree import beam_tree, greedy, logits_of
from clearhead.model import EncoderDecoder
from clearhead.predict.align import align_words, alignment_heads
from clearhead.serve.inspect.explorer import Answer, Exploring, InspectRoute
from clearhead.serve.inspect.requests import BeamRequest, Request
from clearhead.serve.inspect.texts import ExploredModel, TextTrace

router = APIRouter(route_class=InspectRoute)


def _translation(explored: ExploredModel, body: Request) -> TextTrace:
    if not isinstance(explored.network, EncoderDecoder):
        raise UserError("translate: this model is no translator; use another view")
    return explored.trace(body)


@router.post("/align")
async def align(body: Request, explorer: Exploring) -> Response:
    """Cross-attention weights (T, S) with which each target token was predicted: the mean of the alignment heads."""

    def work(explored: ExploredModel) -> Answer:
        text = _translation(explored, body)
        heads = alignment_heads(explored.model)
        with torch.no_grad():
            weights = [text.trace.at("cross", layer).heads_and_weights()[1][head] for layer, head in heads]
        mean = torch.stack(weights).mean(0)[:-1].float().cpu()
        written = text.last.ids[1:]
        words = align_words(explored.model, body.text, written, mean)
        header = {"heads": heads, "source_words": words.source, "target_words": words.target, "links": words.links}
        matrix = torch.tensor(words.weights).reshape(len(words.target), len(words.source))
        return header, {"weights": mean, "words": matrix}

    return await explorer.frame(body.model, work)


@router.post("/beam")
async def beam(body: BeamRequest, explorer: Exploring) -> Response:
    """The tree of a beam search after a forced prefix."""

    def work(explored: ExploredModel) -> Answer:
        network, special = explored.network, explored.model.special_tokens
        text = _translation(explored, Request(model=body.model, text=body.text, target="", appended=body.prefix))
        assert isinstance(network, EncoderDecoder)
        prompt = text.last.ids
        steps = min(body.steps, explored.model.config.max_positions - len(prompt))
        banned = [ids[0] for ids in special.banned_ids if len(ids) == 1]
        with torch.no_grad():
            logits = logits_of(network, text.trace.source)
        options: dict[str, Any] = {"beam": body.beam, "length_penalty": body.length_penalty, "banned": banned}
        tree = beam_tree(logits, prompt, special.eos_ids, steps=max(1, steps), device=explored.model.device, **options)
        texts = {token: explored.show(token) for token in {node.token for node in tree.nodes}}
        hypotheses = []
        for number in tree.hypotheses:
            ids = [*body.prefix, *(token for token in tree.path(number) if token not in special.eos_ids)]
            score = tree.nodes[number].penalized
            hypotheses.append({"node": number, "ids": ids, "text": explored.tokenizer.decode(ids), "score": score})
        nodes = [{**asdict(node), "text": texts[node.token]} for node in tree.nodes]
        forced = [explored.show(token) for token in body.prefix]
        return {"nodes": nodes, "hypotheses": hypotheses, "forced": forced, "eos": special.eos_ids}, {}

    return await explorer.frame(body.model, work)


@router.post("/forced")
async def forced(body: Request, explorer: Exploring) -> Response:
    """Each target token's logprob after the given target, and after the model's own greedy tokens."""

    def work(explored: ExploredModel) -> Answer:
        text = _translation(explored, body)
        assert text.labels is not None
        device, labels = explored.model.device, text.labels
        with torch.no_grad():
            logits = logits_of(explored.network, text.trace.source)
            own = greedy(logits, text.last.ids[:1], (), len(labels) - 1, device)
            history = torch.tensor([[*text.last.ids[:1], *own]], device=device)
            free = logits(history)[0]
        predicted = [int(token) for token in free.argmax(-1)]
        same = [a == b for a, b in zip([*own, predicted[-1]], labels.tolist(), strict=True)]
        parting = same.index(False) if False in same else None
        header = {
            "labels": labels.tolist(),
            "label_texts": [explored.show(token) for token in labels.tolist()],
            "own": predicted,
            "own_texts": [explored.show(token) for token in predicted],
            "parting": parting,
            "forced_loss": text.loss,
            "free_loss": float(F.cross_entropy(free.double(), labels)),
        }
        return header, {"forced": _logprobs(text.logits, labels), "free": _logprobs(free, labels)}

    return await explorer.frame(body.model, work)


def _logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """The logprob of each label: (T,)."""
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
