"""A trace: one pass of the reference network, from which every intermediate number can be computed on demand.

T queries · S keys · H heads · G key-value heads · E head dim · D model dim · F feed-forward dim · V vocabulary

A trace holds the residual stream and the input of every sublayer; scores and weights are recomputed when they are asked
for, so that 512 tokens × 144 heads do not have to fit into memory at once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from clearhead.errors import UserError
from clearhead.interpret.attention import per_head_updates
from clearhead.model import Encoder, EncoderDecoder, Network
from clearhead.model.attention import Attention, Rope
from clearhead.model.layer import Layer
from clearhead.ops.attention.dispatch import attention_with_weights
from clearhead.ops.masks import Mask

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OVERVIEW_LEVELS = 255  # attention weights of an overview are bytes


@dataclass(frozen=True)
class AttentionInput:
    """The arguments of one attention layer, and its output: x (T, D), source (S, D), output (T, D)."""

    layer: Attention
    x: Tensor
    source: Tensor
    mask: Mask
    rope: Rope | None
    output: Tensor

    def qkv(self, rotate: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (1, H, T, E), keys and values (1, G, S, E); without `rotate`, before rotary positions."""
        rope = self.rope if rotate else None
        return self.layer.project_q(self.x[None], rope), *self.layer.project_kv(self.source[None], rope)

    def heads_and_weights(self) -> tuple[Tensor, Tensor]:
        """Per-head output (H, T, E) and attention weights (H, T, S), by the reference attention."""
        heads, weights = attention_with_weights(*self.qkv(), replace(self.mask, pattern=self.layer.pattern))
        return heads[0], weights[0]

    def dense_mask(self) -> Tensor:
        """Where attention is allowed: (T, S)."""
        queries, keys = len(self.x), len(self.source)
        mask = replace(self.mask, pattern=self.layer.pattern).dense(queries, keys, self.x.device)
        if mask is None:
            return torch.ones(queries, keys, dtype=torch.bool, device=self.x.device)
        return mask.reshape(-1, keys).expand(queries, keys)


@dataclass(frozen=True)
class LayerTrace:
    """The residual stream through one layer, each (T, D): its input, what each sublayer adds, its output.

    post-norm normalizes after each addition, so the stream there is not the sum of its parts.
    """

    x: Tensor
    attention: Tensor
    cross: Tensor | None
    feed_forward_input: Tensor
    feed_forward: Tensor
    output: Tensor


@dataclass(frozen=True)
class HeadSteps:
    """One head, step by step; the fields are in the order of computation.

    `value_up` is what each key would add to the residual stream if all attention went to it: v times the slice of
    the output projection of this head. `update` is the weighted sum of its rows.
    """

    residual: Tensor  # (T, D), the stream before the sublayer
    x: Tensor  # (T, D), what queries are projected from: after the norm of a pre-norm layer
    source: Tensor  # (S, D), what keys and values are projected from
    q_unrotated: Tensor | None  # (T, E), before rotary positions
    k_unrotated: Tensor | None  # (S, E)
    q: Tensor  # (T, E)
    k: Tensor  # (S, E)
    v: Tensor  # (S, E)
    scores: Tensor  # (T, S): q kᵀ
    scaled: Tensor  # (T, S): scores / √E
    mask: Tensor  # (T, S)
    weights: Tensor  # (T, S)
    output: Tensor  # (T, E)
    value_up: Tensor  # (S, D)
    update: Tensor  # (T, D)
    sublayer: Tensor  # (T, D), the output of all heads with the bias


class Trace:
    """One pass of a network over one row of ids, without padding and without a cache."""

    def __init__(self, network: Network, source: Tensor | None, target: Tensor | None):
        self.network, self.source, self.target = network, source, target
        self.attention: dict[tuple[Kind, int], AttentionInput] = {}
        self.layers: dict[tuple[Kind, int], LayerTrace] = {}
        self.hidden = torch.empty(0)  # (T, D), of the last stack after its final norm

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of attention that the network has."""
        return [kind for kind in KINDS if (kind, 0) in self.attention]

    def depth(self, kind: Kind) -> int:
        """The number of layers with this kind of attention."""
        return sum(each == kind for each, _ in self.attention)

    def at(self, kind: Kind, layer: int, head: int | None = None) -> AttentionInput:
        """The attention layer with this number; a layer or head that does not exist is an error."""
        found = self.attention.get((kind, layer))
        if found is None or (head is not None and not 0 <= head < found.layer.heads):
            known = ", ".join(f"{each} ({self.depth(each)} layers)" for each in self.kinds)
            heads = self.network.config.heads
            raise UserError(
                f"{kind} layer {layer}{'' if head is None else f', head {head}'}: this model has no such part; "
                f"it has {known} of {heads} heads, counted from 0"
            )
        return found

    @torch.no_grad()
    def overview(self, kind: Kind) -> Tensor:
        """Attention weights of all heads, rounded to 1/255: (L, H, T, S) in uint8."""
        return self.overview_and_patterns(kind)[0]

    @torch.no_grad()
    def overview_and_patterns(self, kind: Kind) -> tuple[Tensor, Tensor]:
        """The overview, and for each head (L, H, 3) the mean weight of the previous token, the first, and the best."""
        pictures, patterns = [], []
        for layer in range(self.depth(kind)):
            weights = self.at(kind, layer).heads_and_weights()[1]  # (H, T, S)
            square = weights.shape[1] == weights.shape[2] > 1 and kind != "cross"
            previous = weights.diagonal(-1, dim1=1, dim2=2).mean(-1) if square else weights.new_zeros(len(weights))
            patterns.append(torch.stack([previous, weights[:, :, 0].mean(-1), weights.amax(-1).mean(-1)], dim=-1))
            pictures.append((weights * OVERVIEW_LEVELS).round().byte())
        return torch.stack(pictures), torch.stack(patterns)

    @torch.no_grad()
    def steps(self, kind: Kind, layer: int, head: int) -> HeadSteps:
        """Every intermediate result of one head."""
        found = self.at(kind, layer, head)
        group = head // (found.layer.heads // found.layer.kv_heads)
        q, k, v = (rows[0] for rows in found.qkv())
        raw_q, raw_k = (rows[0] for rows in found.qkv(rotate=False)[:2])
        heads, weights = found.heads_and_weights()
        scores = q[head] @ k[group].T
        up = per_head_updates(found.layer, _only(v[group], head, found.layer.heads))[0, head]
        rotary = found.rope is not None
        return HeadSteps(
            residual=self.residual(kind, layer),
            x=found.x,
            source=found.source,
            q_unrotated=raw_q[head] if rotary else None,
            k_unrotated=raw_k[group] if rotary else None,
            q=q[head],
            k=k[group],
            v=v[group],
            scores=scores,
            scaled=scores / math.sqrt(q.shape[-1]),
            mask=found.dense_mask(),
            weights=weights[head],
            output=heads[head],
            value_up=up,
            update=per_head_updates(found.layer, heads[None])[0, head],
            sublayer=found.output,
        )

    def residual(self, kind: Kind, layer: int) -> Tensor:
        """The residual stream (T, D) that an attention sublayer adds to."""
        trace = self.layers["encoder" if kind == "encoder" else "decoder", layer]
        if kind != "cross":
            return trace.x
        block = self.stack(kind).layers[layer]
        assert isinstance(block, Layer)
        after = trace.x + trace.attention
        return after if block.pre else block.attention_norm(after)

    @torch.no_grad()
    def updates(self, kind: Kind, layer: int) -> Tensor:
        """What each head adds to the residual stream: (H, T, D)."""
        found = self.at(kind, layer)
        return per_head_updates(found.layer, found.heads_and_weights()[0][None])[0]

    @torch.no_grad()
    def lens(self) -> list[Tensor] | None:
        """Logits (T, V) after each layer, through the final norm and lm_head; None without an lm_head."""
        if self.network.heads.lm_head is None:
            return None
        stack = last_stack(self.network)
        kind: Kind = "encoder" if isinstance(self.network, Encoder) else "decoder"
        outputs = [self.layers[kind, layer].output for layer in range(len(stack.layers))]
        return [self.network.logits(x if stack.norm is None else stack.norm(x, None)) for x in outputs]

    @torch.no_grad()
    def logits(self) -> Tensor | None:
        """The network's logits (T, V), or None without lm_head."""
        return None if self.network.heads.lm_head is None else self.network.logits(self.hidden)

    def stack(self, kind: Kind) -> Any:
        """The stack with this kind of attention."""
        return self.network.encoder if kind == "encoder" else self.network.decoder


def last_stack(network: Network) -> Any:
    """The stack whose hidden states the heads read."""
    return network.encoder if isinstance(network, Encoder) else network.decoder


def own_copy(network: Network) -> Network:
    """A copy with the same parameters, not copied, but its own modules: hooks on it see no passes of other threads."""
    shared = {id(tensor): tensor for tensor in [*network.parameters(), *network.buffers()]}
    return copy.deepcopy(network, shared).eval()


def trace_network(
    network: Network, source: Sequence[int] | None, target: Sequence[int] | None, segments: Sequence[int] | None = None
) -> Trace:
    """Run the reference network once. `network` must not run elsewhere meanwhile; see `own_copy`."""
    device = next(network.parameters()).device
    rows = [None if ids is None else torch.tensor([ids], device=device) for ids in (source, target, segments)]
    trace = Trace(network, *rows[:2])
    with torch.no_grad(), _recording(network, trace):
        trace.hidden = run_network(network, *rows)[0]
    if not trace.hidden.isfinite().all():
        raise UserError("the hidden states contain NaN or infinity; use an earlier checkpoint, or train again")
    return trace


def run_network(network: Network, source: Tensor | None, target: Tensor | None, segments: Tensor | None) -> Tensor:
    """The hidden states (1, T, D) that the heads read, for ids (1, S) and (1, T)."""
    if isinstance(network, EncoderDecoder):
        assert source is not None and target is not None  # noqa: PT018
        return network.decode(target, network.encode(source))
    if isinstance(network, Encoder):
        assert source is not None
        return network.encode(source, segments=segments)
    return network.decode(target)  # type: ignore[operator]


@contextmanager
def _recording(network: Network, trace: Trace) -> Iterator[None]:
    """Record the inputs and outputs of all layers and sublayers."""
    handles = []
    for stack_name in ("encoder", "decoder"):
        stack = getattr(network, stack_name, None)
        for number, layer in enumerate(stack.layers if stack is not None else ()):
            parts: dict[str, Any] = {}
            kinds = ((stack_name, layer.attention), ("cross", layer.cross_attention))
            for kind, attention in kinds:
                if attention is not None:
                    hook = _attention_hook(trace, kind, number, parts)
                    handles.append(attention.register_forward_hook(hook, with_kwargs=True))
            handles.append(layer.feed_forward.register_forward_hook(_feed_forward_hook(parts)))
            handles.append(layer.register_forward_hook(_layer_hook(trace, stack_name, number, parts)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attention_hook(trace: Trace, kind: Any, number: int, parts: dict[str, Any]) -> Callable[..., None]:
    def hook(layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        names = ("x", "mask", "encoder_output", "rope", "cache")
        given = dict(zip(names, args, strict=False)) | kwargs
        x = given["x"][0]
        source = given["encoder_output"][0] if layer.is_cross else x
        trace.attention[kind, number] = AttentionInput(layer, x, source, given["mask"], given.get("rope"), output[0])
        parts["cross" if layer.is_cross else "attention"] = output[0]

    return hook


def _feed_forward_hook(parts: dict[str, Any]) -> Callable[..., None]:
    def hook(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        parts["feed_forward_input"], parts["feed_forward"] = args[0][0], output[0]

    return hook


def _layer_hook(trace: Trace, stack: Any, number: int, parts: dict[str, Any]) -> Callable[..., None]:
    def hook(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        cross = parts.get("cross")
        trace.layers[stack, number] = LayerTrace(
            args[0][0], parts["attention"], cross, parts["feed_forward_input"], parts["feed_forward"], output[0]
        )

    return hook


def _only(rows: Tensor, head: int, heads: int) -> Tensor:
    """Rows (S, E) as the output of one head among zeros: (1, H, S, E)."""
    out = rows.new_zeros(1, heads, *rows.shape)
    out[0, head] = rows
    return out


def read_out(network: Network, hidden: Tensor) -> Tensor:
    """The logits (N, K) of the first head that the network has: (T, V) of tokens, else of classes, tags or a span."""
    heads = network.heads
    if heads.lm_head is not None:
        return network.logits(hidden)
    if heads.tags is not None:
        return heads.tags(hidden)
    if heads.classes is not None:
        return heads.classes(heads.pool(hidden[None]))
    if heads.span is not None:
        return heads.span(hidden).T
    return hidden
