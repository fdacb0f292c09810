"""Layers that read one token a row with few small operations: at that size, each costs more than its arithmetic.

H heads · G key-value heads · E head width · D width · S keys · F feed-forward width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.inference.fused_layers import FusedAttention, FusedFeedForward
from clearhead.inference.translator_decode_layer import translator_decode_layers
from clearhead.model.attention import Rope
from clearhead.model.cache import LayerKVCache
from clearhead.model.layer import Layer
from clearhead.model.norms import RMSNorm
from clearhead.model.stack import Stack
from clearhead.ops.masks import Mask

ZERO = torch.zeros(())


class RopeCache:
    """What turns queries and keys at one position, made by the first layer of a step and used by all."""

    def __init__(self, heads: int, kv_heads: int):
        self.heads, self.kv_heads = heads, kv_heads
        self.held: tuple[Any, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))

    def of(self, rotation: Rope) -> tuple[Tensor, Tensor]:
        """Factors (H + G, E) of x and of x with its halves exchanged; queries are scaled by them as well."""
        held = self.held
        if held[0] is not rotation:
            cos, sin = (x.flatten() for x in rotation)  # (E/2,)
            factors = torch.cat([cos, cos, -sin, sin]).view(2, 1, -1).repeat(1, self.heads + self.kv_heads, 1)
            factors[:, : self.heads] *= factors.shape[-1] ** -0.5
            held = self.held = (rotation, factors[0], factors[1])
        return held[1], held[2]


class DecodeLayer(Layer):
    """A pre-norm layer with RMSNorm, rotary attention to everything and a gated feed-forward, as Llama's."""

    def __init__(self, plain: Layer, turns: RopeCache):
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
        rotation: Rope | None = None,
        encoder_output: Tensor | None = None,
        cross_mask: Mask | None = None,
        cache: LayerKVCache | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        # A length that stands in a tensor is not all that the cache holds: others in the batch were longer.
        is_step = x.shape[:2] == (1, 1) and mask.tree is None and not isinstance(mask.start, Tensor)
        if cache is None or rotation is None or not is_step:
            return super().forward(x, mask, rotation, encoder_output, cross_mask, cache, real)
        joined, output, wide, down = self.products
        heads = joined(_normed(x, *self.norms[0])).view(self.turns.heads + 2 * self.turns.kv_heads, -1)  # (H + 2G, E)
        x = x + output(self._look(heads, rotation, cache).view(1, 1, -1))
        gate, up = wide(_normed(x, *self.norms[1])).chunk(2, dim=-1)
        return x.add_(down(F.silu(gate).mul_(up)))

    def _look(self, heads: Tensor, rotation: Rope, cache: LayerKVCache) -> Tensor:
        """What the heads (H + 2G, E) bring home from the cache, into which their own keys and values go first."""
        groups = self.turns.kv_heads
        turning, v = heads[:-groups], heads[-groups:]
        straight, crossed = self.turns.of(rotation)
        turned = torch.addcmul(turning * straight, turning.roll(heads.shape[1] // 2, 1), crossed)  # (H + G, E)
        q, k = turned[:-groups], turned[-groups:]
        keys, values = cache.extend(k[None, :, None], v[None, :, None])  # (1, G, S, E)
        scores = torch.bmm(q.view(groups, -1, heads.shape[1]), keys[0].transpose(1, 2))  # (G, H/G, S)
        return torch.bmm(scores.softmax(dim=-1), values[0])


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of a single token."""
    flat = x.view(-1)
    square = float(torch.dot(flat, flat)) / len(flat)
    return torch.addcmul(ZERO, x, weight, value=(square + eps) ** -0.5)  # cheaper than two products


def use_decode_layers(network: nn.Module) -> None:
    """Below `network`, let every layer that can be light be so."""
    for stack in [module for module in network.modules() if isinstance(module, Stack)]:
        layers: list[Any] = list(stack.layers)
        if all(_supports(layer) for layer in layers):
            turns = RopeCache(layers[0].attention.heads, layers[0].attention.kv_heads)
            stack.layers = nn.ModuleList(DecodeLayer(layer, turns) for layer in layers)
        elif (light := translator_decode_layers(stack.config, layers)) is not None:
            stack.layers = nn.ModuleList(light)


def _supports(layer: Layer) -> bool:
    if not layer.pre or layer.cross_attention is not None:
        return False
    norms, attention, forward = (layer.attention_norm, layer.feed_forward_norm), layer.attention, layer.feed_forward
    if not all(isinstance(norm, RMSNorm) and _is_plain(norm.weight) for norm in norms):
        return False
    if not isinstance(attention, FusedAttention) or attention.pattern.kind != "full":
        return False
    return isinstance(forward, FusedFeedForward) and forward.is_gated and forward.activation is F.silu


def _is_plain(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.is_cpu
