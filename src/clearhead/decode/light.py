"""Layers that read one token a row with few small operations: at that size, each costs more than its arithmetic.

H heads · G key-value heads · E head width · D width · S keys · F feed-forward width
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.decode.fused import FusedAttention, FusedFeedForward
from clearhead.model.attention import Rotation
from clearhead.model.cache import LayerCache
from clearhead.model.dense import few_queries, half_queries
from clearhead.model.layer import Layer
from clearhead.model.masks import Mask
from clearhead.model.norms import LayerNorm, RMSNorm
from clearhead.model.stack import Stack

ZERO = torch.zeros(())


class Turns:
    """What turns queries and keys at one position, made by the first layer of a step and used by all."""

    def __init__(self, heads: int, kv_heads: int):
        self.heads, self.kv_heads = heads, kv_heads
        self.held: tuple[Any, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))

    def of(self, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Factors (H + G, E) of x and of x with its halves exchanged; queries are scaled by them as well."""
        held = self.held
        if held[0] is not rotation:
            cos, sin = (x.flatten() for x in rotation)  # (E/2,)
            factors = torch.cat([cos, cos, -sin, sin]).view(2, 1, -1).repeat(1, self.heads + self.kv_heads, 1)
            factors[:, : self.heads] *= factors.shape[-1] ** -0.5
            held = self.held = (rotation, factors[0], factors[1])
        return held[1], held[2]


class LightLayer(Layer):
    """A pre-norm layer with RMSNorm, rotary attention to everything and a gated feed-forward, as Llama's."""

    def __init__(self, plain: Layer, turns: Turns):
        nn.Module.__init__(self)
        self.pre, self.turns, self.training = plain.pre, turns, plain.training
        self.attention, self.attention_norm = plain.attention, plain.attention_norm
        self.feed_forward, self.feed_forward_norm = plain.feed_forward, plain.feed_forward_norm
        self.cross_attention, self.cross_norm, self.dropout = None, None, plain.dropout
        parts: Any = (self.attention, self.feed_forward)
        products = (parts[0].joined, parts[0].output, parts[1].joined, parts[1].down)
        self.products = tuple(product.forward for product in products)  # called without a module's bookkeeping
        norms: Any = (self.attention_norm, self.feed_forward_norm)
        self.norms = tuple((norm.weight.detach(), norm.eps) for norm in norms)

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        rotation: Rotation | None = None,
        memory: Tensor | None = None,
        memory_mask: Mask | None = None,
        cache: LayerCache | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        # A length that stands in a tensor is not all that the cache holds: others in the batch were longer.
        is_step = x.shape[:2] == (1, 1) and mask.paths is None and not isinstance(mask.start, Tensor)
        if cache is None or rotation is None or not is_step:
            return super().forward(x, mask, rotation, memory, memory_mask, cache, real)
        joined, output, wide, down = self.products
        heads = joined(_normed(x, *self.norms[0])).view(self.turns.heads + 2 * self.turns.kv_heads, -1)  # (H + 2G, E)
        x = x + output(self._look(heads, rotation, cache).view(1, 1, -1))
        gate, up = wide(_normed(x, *self.norms[1])).chunk(2, dim=-1)
        return x.add_(down(F.silu(gate).mul_(up)))

    def _look(self, heads: Tensor, rotation: Rotation, cache: LayerCache) -> Tensor:
        """What the heads (H + 2G, E) bring home from the cache, into which their own keys and values go first."""
        groups = self.turns.kv_heads
        turning, v = heads[:-groups], heads[-groups:]
        straight, crossed = self.turns.of(rotation)
        turned = torch.addcmul(turning * straight, turning.roll(heads.shape[1] // 2, 1), crossed)  # (H + G, E)
        q, k = turned[:-groups], turned[-groups:]
        keys, values = cache.extend(k[None, :, None], v[None, :, None])  # (1, G, S, E)
        scores = torch.bmm(q.view(groups, -1, heads.shape[1]), keys[0].transpose(1, 2))  # (G, H/G, S)
        return torch.bmm(scores.softmax(dim=-1), values[0])


class Unseen:
    """What is hidden in one step, made by its first layer and used by all."""

    def __init__(self) -> None:
        self.held: tuple[Tensor | None, Tensor | None] = (None, None)

    def of(self, lengths: Tensor | None, keys: int) -> Tensor | None:
        """Numbers to add to scores, (B, 1, 1, S): -inf behind the lengths (B,) of sources."""
        held = self.held  # read once: workers share the network, and each has a step of its own
        if held[0] is not lengths:
            hidden = None if lengths is None else _hiding(torch.arange(keys) >= lengths[:, None, None, None])
            held = self.held = (lengths, hidden)
        return held[1]

    def off(self, paths: Tensor | None, keys: int) -> Tensor | None:
        """Numbers to add to scores, (B, 1, K, S): -inf off the paths (B, K, up to S) of branches."""
        held = self.held
        if held[0] is not paths:
            hidden = None if paths is None else _hiding(F.pad(~paths[:, None], (0, keys - paths.shape[2]), value=True))
            held = self.held = (paths, hidden)
        return held[1]


def _hiding(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)


class LightTranslatorLayer(Layer):
    """A decoder's layer beside a source, with LayerNorm and nothing that turns: one token in each of many rows, all of
    them equally long, or in each branch of these rows, which share a source."""

    def __init__(self, plain: Layer, unseen: Unseen, astray: Unseen):
        nn.Module.__init__(self)
        self.pre, self.unseen, self.astray, self.training = plain.pre, unseen, astray, plain.training
        self.attention, self.attention_norm = plain.attention, plain.attention_norm
        self.cross_attention, self.cross_norm, self.dropout = plain.cross_attention, plain.cross_norm, plain.dropout
        self.feed_forward, self.feed_forward_norm = plain.feed_forward, plain.feed_forward_norm
        own, cross, forward = (cast(Any, part) for part in (self.attention, self.cross_attention, self.feed_forward))
        # What follows is called without a module's bookkeeping.
        products = (own.joined, own.output, cross.query, cross.output, forward.joined, forward.down)
        self.products = tuple(product.forward for product in products)
        self.heads, self.activation = own.heads, forward.activation
        norms = (cast(Any, norm) for norm in (self.attention_norm, self.cross_norm, self.feed_forward_norm))
        self.norms = tuple((norm.normalized_shape, norm.weight, norm.bias, norm.eps) for norm in norms)

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        rotation: Rotation | None = None,
        memory: Tensor | None = None,
        memory_mask: Mask | None = None,
        cache: LayerCache | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        paths, (rows, tokens, width) = mask.paths, x.shape
        is_step = paths is not None or (tokens == 1 and isinstance(mask.start, int))
        if cache is None or cache.source is None or not is_step:
            return super().forward(x, mask, rotation, memory, memory_mask, cache, real)
        assert memory_mask is not None
        joined, output, ask, bring, wide, down = self.products
        heads, flat = self.heads, x.reshape(rows * tokens, width)
        q, k, v = joined(self._before(flat, 0)).view(rows, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, E)
        keys, values = cache.extend(k, v)
        astray = self.astray.off(None if paths is None else paths.allowed, keys.shape[2])
        flat = self._after(flat, 0, output(_looked(q, keys, values, astray)))
        q, (keys, values) = ask(self._before(flat, 1)).view(rows, tokens, heads, -1).transpose(1, 2), cache.source
        hidden = self.unseen.of(memory_mask.lengths, keys.shape[2])
        flat = self._after(flat, 1, bring(_looked(q, keys, values, hidden)))
        flat = self._after(flat, 2, down(self.activation(wide(self._before(flat, 2)))))
        return flat.view(rows, tokens, width)

    def _before(self, x: Tensor, sublayer: int) -> Tensor:
        return torch.layer_norm(x, *self.norms[sublayer]) if self.pre else x

    def _after(self, x: Tensor, sublayer: int, found: Tensor) -> Tensor:
        x = found.add_(x)
        return x if self.pre else torch.layer_norm(x, *self.norms[sublayer])


def _looked(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """What the queries (B, H, T, E) bring home, their heads joined: (B · T, D)."""
    look = half_queries if keys.dtype == torch.bfloat16 else few_queries
    found = look(q, keys, values, hidden).view(q.shape).transpose(1, 2)
    return found.to(q.dtype, memory_format=torch.contiguous_format).reshape(len(q) * q.shape[2], -1)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of a single token."""
    flat = x.view(-1)
    square = float(torch.dot(flat, flat)) / len(flat)
    return torch.addcmul(ZERO, x, weight, value=(square + eps) ** -0.5)  # cheaper than two products


def lighten(network: nn.Module) -> None:
    """Below `network`, let every layer that can be light be so."""
    for stack in [module for module in network.modules() if isinstance(module, Stack)]:
        layers: list[Any] = list(stack.layers)
        if all(_can_be_light(layer) for layer in layers):
            turns = Turns(layers[0].attention.heads, layers[0].attention.kv_heads)
            stack.layers = nn.ModuleList(LightLayer(layer, turns) for layer in layers)
        elif stack.config.position != "rotary" and all(_can_translate_lightly(layer) for layer in layers):
            unseen, astray = Unseen(), Unseen()
            stack.layers = nn.ModuleList(LightTranslatorLayer(layer, unseen, astray) for layer in layers)


def _can_be_light(layer: Layer) -> bool:
    if not layer.pre or layer.cross_attention is not None:
        return False
    norms, attention, forward = (layer.attention_norm, layer.feed_forward_norm), layer.attention, layer.feed_forward
    if not all(isinstance(norm, RMSNorm) and _is_plain(norm.weight) for norm in norms):
        return False
    if not isinstance(attention, FusedAttention) or attention.pattern.kind != "full":
        return False
    return isinstance(forward, FusedFeedForward) and forward.is_gated and forward.activation is F.silu


def _can_translate_lightly(layer: Layer) -> bool:
    attention, cross, forward = layer.attention, layer.cross_attention, layer.feed_forward
    norms = (layer.attention_norm, layer.cross_norm, layer.feed_forward_norm)
    if not all(
        isinstance(norm, LayerNorm) and norm.weight.dtype == torch.float32 and norm.weight.is_cpu for norm in norms
    ):
        return False
    if not isinstance(attention, FusedAttention) or not isinstance(cross, FusedAttention):
        return False
    full = attention.pattern.kind == "full" and attention.heads == attention.kv_heads
    return full and isinstance(forward, FusedFeedForward) and not forward.is_gated


def _is_plain(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.is_cpu
