"""Routes about the models themselves: what is served, which views it has, and the code behind a step."""

from __future__ import annotations

import inspect
from typing import Any

from fastapi import APIRouter

from clearhead.errors import UserError
from clearhead.inference.alignment import alignment_weights
from clearhead.inference.sampling import Sampler
from clearhead.interpret.beam_tree import beam_tree
from clearhead.interpret.switches import effect_of, loss_of
from clearhead.model import Decoder, Encoder, EncoderDecoder
from clearhead.model.attention import Attention, split_heads
from clearhead.model.cost import count_parameters
from clearhead.model.embedding import Embedding
from clearhead.model.feedforward import FeedForward
from clearhead.model.layer import Layer
from clearhead.model.positions import apply_rope
from clearhead.ops.attention.reference import attention
from clearhead.serve.inspect.explorer import Exploring, InspectRoute
from clearhead.serve.inspect.texts import MAX_TOKENS, ExploredModel
from clearhead.serve.inspect.understand import logprob_drops

router = APIRouter(route_class=InspectRoute)
EXAMPLES = {  # of a family, where a model's config.json has none
    "encoder-decoder": "Two dogs are playing in the snow.",
    "encoder": "She opened the [MASK] and looked out.",
    "decoder": "She opened the door and looked",
}
CHINESE_EXAMPLE = "两只狗在雪地里玩。"
CODE: dict[str, Any] = {
    "project_q": Attention.project_q,
    "project_kv": Attention.project_kv,
    "split_heads": split_heads,
    "rope": apply_rope,
    "attention": attention,
    "merge_heads": Attention.merge_heads,
    "residual": Layer._add,
    "feed_forward": FeedForward.forward,
    "embedding": Embedding.forward,
    "sampling": Sampler.filter_logits,
    "alignment": alignment_weights,
    "beam": beam_tree,
    "loss": loss_of,
    "effect": effect_of,
    "drops": logprob_drops,
}


@router.get("/models")
async def models(explorer: Exploring) -> dict[str, Any]:
    """The models of this server, with their layers and views."""
    found = [describe(each) for each in explorer.models.values()]
    for each in found:
        each["views"] += explorer.own_views if each["tokenizer"] else []
    return {"models": found, "max_tokens": MAX_TOKENS}


def describe(explored: ExploredModel) -> dict[str, Any]:
    """One model for the page."""
    model, config = explored.model, explored.model.config
    outputs = {name: getattr(model.network.heads, name) is not None for name in ("lm_head", "classes", "tags", "span")}
    return {
        "name": explored.name,
        "family": config.family,
        "parameters": count_parameters(model.network),
        "config": config.model_dump(mode="json"),
        "views": views(explored),
        "outputs": [name for name, present in outputs.items() if present],
        "labels": list(model.extra.get("labels") or [])[:1000],
        "example": example_of(explored),
        "dtype": str(next(model.network.parameters()).dtype).removeprefix("torch."),
        "device": str(model.device),
        "tokenizer": bool(model.own_tokenizers),
    }


def views(explored: ExploredModel) -> list[str]:
    """The views that a model has."""
    if not explored.model.own_tokenizers:
        return []
    network = explored.model.network
    with_lm = network.heads.lm_head is not None
    own = {
        "next": with_lm and not isinstance(network, Encoder),
        "translate": isinstance(network, EncoderDecoder),
        "understand": isinstance(network, Encoder),
    }
    order = ("tokens", "attention", "steps", "next", "translate", "switches", "understand", "compare")
    return [name for name in order if own.get(name, True)]


def example_of(explored: ExploredModel) -> str:
    """A text that the model can read: Chinese where its tokenizer splits Chinese into fewer tokens than bytes."""
    model = explored.model
    if model.own_tokenizers and isinstance(model.network, EncoderDecoder | Decoder):
        ids = model.tokenizer.encode(CHINESE_EXAMPLE)
        if len(ids) <= len(CHINESE_EXAMPLE) and model.tokenizer.roles.get("unknown") not in ids:
            return CHINESE_EXAMPLE
    return EXAMPLES[model.config.family]


@router.get("/code/{name}")
async def code(name: str) -> dict[str, Any]:
    """The lines of our source behind a step."""
    if name not in CODE:
        raise UserError(f"code: {name[:40]!r} is not known; there is {', '.join(CODE)}")
    lines, first = inspect.getsourcelines(CODE[name])
    module = inspect.getmodule(CODE[name])
    return {"file": (module.__name__ if module else "").replace(".", "/") + ".py", "line": first, "lines": lines}
