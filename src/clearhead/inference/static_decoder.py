"""A copy of a decoder for one-token steps over static tensors: fused linears and a static KV cache.

B batch · D model dim · H heads · G key-value heads · C slots · E head dim · N outputs · K inputs

Layers, norms and embeddings are the network's own; attention and feed-forward are replaced by modules for one new token
a row, which can be compiled and captured in a CUDA graph.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.model import Decoder
from clearhead.model.attention import Attention, Rope
from clearhead.model.feedforward import FeedForward
from clearhead.model.positions import apply_rope
from clearhead.ops.attention.sdpa import sdpa
from clearhead.ops.linear.quantized import QuantizedLinear
from clearhead.ops.triton.decode_attention import (
    triton_decode_attention,
    triton_decode_attention_supports,
    triton_works,
)

CHUNK = 128  # slots summed together in `cached_attention`; the number of slots is a multiple of it
MIN_CHUNKED_SLOTS = 1024  # above this, sums over slots are chunked
ENOUGH_HEADS = 128  # rows × key-value heads that keep all multiprocessors of a GPU busy

AnyLinear = nn.Linear | QuantizedLinear


class StaticKV(NamedTuple):
    """The static KV cache of one layer."""

    keys: Tensor  # (B, G, C, E)
    values: Tensor
    lengths: Tensor  # (B,) cached tokens; the new token goes to this slot
    attn_bias: Tensor  # (B, 1, 1, C): 0 up to the new token, -inf after it


class FusedLinear(nn.Module):
    """Linear layers over the same input as one: x (…, K) to (…, N), the outputs concatenated.

    The parts become views of the fused weight, so no weight is stored twice. With int8 weights, activations stay in
    floating point: a step of few rows is bound by reading weights, which int8 halves.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None

    def __init__(self, parts: Sequence[AnyLinear]):
        super().__init__()
        quantized = isinstance(parts[0], QuantizedLinear)
        self.register_buffer("weight", _concat_as_views([part.weight for part in parts]))
        self.register_buffer("bias", _concat_as_views([part.bias for part in parts if part.bias is not None]))
        scales = [part.scale for part in parts if isinstance(part, QuantizedLinear)]
        self.register_buffer("scale", torch.cat(scales)[:, 0] if quantized else None)  # (N,)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            return F.linear(x, self.weight, self.bias)
        out = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)


def _concat_as_views(tensors: list[Tensor]) -> Tensor | None:
    """Concatenate tensors along the first axis and make each of them a view of the result."""
    if len(tensors) < 2:
        return tensors[0].detach() if tensors else None
    fused = torch.cat([tensor.detach() for tensor in tensors])
    for tensor, view in zip(tensors, fused.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = view
    return fused


class StaticAttention(nn.Module):
    """Attention of one new token a row over a static KV cache; the signature is that of Attention."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        self.qkv = FusedLinear([attention.query, attention.key, attention.value])
        self.output = FusedLinear([attention.output])
        self.query_norm, self.key_norm = attention.query_norm, attention.key_norm
        self.use_triton = triton_works(self.qkv.weight.device)

    def forward(
        self,
        x: Tensor,
        mask: None,
        encoder_output: None = None,
        rope: Rope | None = None,
        cache: StaticKV | None = None,
    ) -> Tensor:
        """(B, 1, D) to (B, 1, D); the new key and value are stored in the cache."""
        assert cache is not None
        heads = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))  # (B, 1, H + 2G, E)
        if self.query_norm is not None and self.key_norm is not None:
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
            heads = torch.cat([self.query_norm(q), self.key_norm(k), v], dim=2)
        if self.use_triton and triton_decode_attention_supports(heads[:, 0], cache.keys):
            out = triton_decode_attention(heads[:, 0], rope, cache.keys, cache.values, cache.lengths)
            return self.output(out.reshape(len(x), 1, -1))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        rows = torch.arange(len(x), device=x.device)
        cache.keys[rows, :, cache.lengths] = k[:, 0]
        cache.values[rows, :, cache.lengths] = v[:, 0]
        if torch.compiler.is_compiling() and len(x) * self.kv_heads < ENOUGH_HEADS:
            out = cached_attention(q[:, 0], cache)
        else:  # the mask never hides the new token itself
            out = sdpa(q.transpose(1, 2), cache.keys, cache.values, cache.attn_bias, no_empty_rows=True)
        return self.output(out.reshape(len(x), 1, -1).to(x.dtype))


def cached_attention(q: Tensor, cache: StaticKV) -> Tensor:
    """Attention of q (B, H, E), to (B, H, E), as sums that torch.compile splits along the slots.

    With few rows there are fewer heads than multiprocessors, and a kernel with one program a head is slow.
    """
    q = q.to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[-1])
    q = q.unflatten(1, (cache.keys.shape[1], -1))  # (B, G, H/G, E)
    scores = (q[:, :, :, None] * cache.keys[:, :, None]).sum(dim=-1) + cache.attn_bias  # (B, G, H/G, C)
    weighted = scores.softmax(dim=-1)[..., None] * cache.values[:, :, None]  # (B, G, H/G, C, E)
    if weighted.shape[3] > MIN_CHUNKED_SLOTS:
        weighted = weighted.unflatten(3, (-1, CHUNK)).sum(dim=4)  # (B, G, H/G, C/chunk, E)
    return weighted.sum(dim=3).flatten(1, 2)


class StaticFeedForward(nn.Module):
    """Gated feed-forward with fused gate and up projections."""

    def __init__(self, feed_forward: FeedForward):
        super().__init__()
        assert feed_forward.gate is not None
        self.gate_up = FusedLinear([feed_forward.gate, feed_forward.up])
        self.activation, self.down = feed_forward.activation, FusedLinear([feed_forward.down])
        self.gate, self.up = FusedLinear([feed_forward.gate]), FusedLinear([feed_forward.up])  # views of gate_up

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, D) to (B, 1, D)."""
        if torch.compiler.is_compiling() and len(x) == 1:  # two matrix-vector products, compiled to one kernel
            return self.down(self.activation(self.gate(x)) * self.up(x))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


def can_be_static(network: nn.Module) -> TypeGuard[Decoder]:
    """Return whether a static copy is supported: decoders with full attention, weights in floating point or int8."""
    if not isinstance(network, Decoder) or set(network.config.attention) != {"full"}:
        return False
    if network.heads.lm_head is None or type(network.heads.lm_head.proj) not in (nn.Linear, QuantizedLinear):
        return False
    return not any(isinstance(module, QuantizedLinear) and module.bits != 8 for module in network.modules())


def static_copy(network: Decoder) -> Decoder:
    """Return the static copy, which shares all weights with the network; its layers take a `StaticKV` as cache."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    static = copy.deepcopy(network, shared)
    layer: Any
    for layer in static.decoder.layers:
        layer.attention = StaticAttention(layer.attention)
        feed_forward = layer.feed_forward
        if feed_forward.gate is not None:
            layer.feed_forward = StaticFeedForward(feed_forward)
        else:
            feed_forward.up, feed_forward.down = FusedLinear([feed_forward.up]), FusedLinear([feed_forward.down])
    assert static.heads.lm_head is not None
    static.heads.lm_head.proj = FusedLinear([static.heads.lm_head.proj])  # type: ignore[assignment]
    return static
