"""Llama-style decode layer for one row on the CPU: few small operations, since overhead dominates at that size.

H heads · G key-value heads · E head dim · S keys
"""

from __future__ import annotations

from typing import Any, cast

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
    """RoPE factors of one position, computed by the first layer of a step and shared by all."""

    def __init__(self, heads: int, kv_heads: int):
        self.heads, self.kv_heads = heads, kv_heads
        self.cached: tuple[Any, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))

    def factors(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return factors (H + G, E) for x and for x with swapped halves; those of queries include 1/√E."""
        cached = self.cached
        if cached[0] is not rope:
            cos, sin = (x.flatten() for x in rope)  # (E/2,)
            factors = torch.cat([cos, cos, -sin, sin]).view(2, 1, -1).repeat(1, self.heads + self.kv_heads, 1)
            factors[:, : self.heads] *= factors.shape[-1] ** -0.5
            cached = self.cached = (rope, factors[0], factors[1])
        return cached[1], cached[2]


class DecodeLayer(Layer):
    """A pre-norm layer with RMSNorm, RoPE, full attention and a gated feed-forward, as in Llama."""

    def __init__(self, layer: Layer, rope_cache: RopeCache):
        nn.Module.__init__(self)
        self.pre, self.rope_cache, self.training = layer.pre, rope_cache, layer.training
        self.attention, self.attention_norm = layer.attention, layer.attention_norm
        self.feed_forward, self.feed_forward_norm = layer.feed_forward, layer.feed_forward_norm
        self.cross_attention, self.cross_norm, self.dropout = None, None, layer.dropout
        attention, feed_forward = (cast(Any, part) for part in (self.attention, self.feed_forward))
        linears = (attention.qkv, attention.output, feed_forward.up, feed_forward.down)
        self.linears = tuple(linear.forward for linear in linears)  # without the overhead of Module.__call__
        norms = (cast(Any, norm) for norm in (self.attention_norm, self.feed_forward_norm))
        self.norms = tuple((norm.weight.detach(), norm.eps) for norm in norms)

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        rope: Rope | None = None,
        encoder_output: Tensor | None = None,
        cross_mask: Mask | None = None,
        cache: LayerKVCache | None = None,
        norm_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        # With `mask.start` a tensor, this row is shorter than the cache: other rows of the batch were longer.
        is_step = x.shape[:2] == (1, 1) and mask.tree is None and not isinstance(mask.start, Tensor)
        if cache is None or rope is None or not is_step:
            return super().forward(x, mask, rope, encoder_output, cross_mask, cache, norm_mask)
        qkv, output, gate_up, down = self.linears
        heads = qkv(_rms_norm(x, *self.norms[0]))
        heads = heads.view(self.rope_cache.heads + 2 * self.rope_cache.kv_heads, -1)  # (H + 2G, E)
        x = x + output(self._attend(heads, rope, cache).view(1, 1, -1))
        gate, up = gate_up(_rms_norm(x, *self.norms[1])).chunk(2, dim=-1)
        return x.add_(down(F.silu(gate).mul_(up)))

    def _attend(self, heads: Tensor, rope: Rope, cache: LayerKVCache) -> Tensor:
        """Attention of the new token's heads (H + 2G, E) over the cache, after adding its key and value: (H, E)."""
        groups = self.rope_cache.kv_heads
        qk, v = heads[:-groups], heads[-groups:]
        cos, sin = self.rope_cache.factors(rope)
        qk = torch.addcmul(qk * cos, qk.roll(heads.shape[1] // 2, 1), sin)  # (H + G, E)
        q, k = qk[:-groups], qk[-groups:]
        keys, values = cache.extend(k[None, :, None], v[None, :, None])  # (1, G, S, E)
        scores = torch.bmm(q.view(groups, -1, heads.shape[1]), keys[0].transpose(1, 2))  # (G, H/G, S)
        return torch.bmm(scores.softmax(dim=-1), values[0])


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of a single token."""
    flat = x.view(-1)
    mean_square = float(torch.dot(flat, flat)) / len(flat)
    return torch.addcmul(ZERO, x, weight, value=(mean_square + eps) ** -0.5)  # cheaper than two multiplications


def use_decode_layers(network: nn.Module) -> None:
    """Replace the layers of every stack below `network` by decode layers where they support it."""
    for stack in [module for module in network.modules() if isinstance(module, Stack)]:
        layers: list[Any] = list(stack.layers)
        if all(_supports(layer) for layer in layers):
            rope_cache = RopeCache(layers[0].attention.heads, layers[0].attention.kv_heads)
            stack.layers = nn.ModuleList(DecodeLayer(layer, rope_cache) for layer in layers)
        elif (decode_layers := translator_decode_layers(stack.config, layers)) is not None:
            stack.layers = nn.ModuleList(decode_layers)


def _supports(layer: Layer) -> bool:
    if not layer.pre or layer.cross_attention is not None:
        return False
    norms = (layer.attention_norm, layer.feed_forward_norm)
    if not all(isinstance(norm, RMSNorm) and _is_fp32_on_cpu(norm.weight) for norm in norms):
        return False
    attention, feed_forward = layer.attention, layer.feed_forward
    if not isinstance(attention, FusedAttention) or attention.pattern.kind != "full":
        return False
    if attention.query_norm is not None:
        return False
    return isinstance(feed_forward, FusedFeedForward) and feed_forward.is_gated and feed_forward.activation is F.silu


def _is_fp32_on_cpu(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.is_cpu
