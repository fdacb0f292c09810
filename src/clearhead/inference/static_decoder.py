"""A decoder's twin for steps of one token a row: products over the same numbers are one, keys have fixed places.

B rows · D width · H heads · G key-value heads · C slots · E head width · N outputs · K inputs

Put on from outside: layers, norms and embeddings are the network's own; attention and feed-forward are replaced by
forms that know of one new token alone. What a compiler may then fuse, and a CUDA graph replay, is all that happens.
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
from clearhead.ops.triton.decode_attention import kernel_supports, triton_decode_attention, triton_works

CHUNK = 128  # slots that are summed together where there are many; their number is a multiple of it
MANY = 1024
BUSY = 128  # rows × key-value heads from which on these alone give all of a GPU's multiprocessors work

Product = nn.Linear | QuantizedLinear


class StaticKV(NamedTuple):
    """The past as one layer sees it."""

    keys: Tensor  # (B, G, C, E)
    values: Tensor
    lengths: Tensor  # (B,) tokens that are there; the new one is put behind them
    hidden: Tensor  # (B, 1, 1, C) to be added to scores: 0 up to the new token, -inf behind it


class FusedLinear(nn.Module):
    """Several products over the same input as one: x (…, K) to (…, N), the outputs side by side.

    The parts become views of it, so that no weight is there twice. Of 8-bit weights only the weights are rounded, not
    the activations: with one row the time goes into reading weights, and a byte of them is half of two.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None

    def __init__(self, parts: Sequence[Product]):
        super().__init__()
        small = isinstance(parts[0], QuantizedLinear)
        self.register_buffer("weight", _as_one([part.weight for part in parts]))
        self.register_buffer("bias", _as_one([part.bias for part in parts if part.bias is not None]))
        scales = [part.scale for part in parts if isinstance(part, QuantizedLinear)]
        self.register_buffer("scale", torch.cat(scales)[:, 0] if small else None)  # (N,)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            return F.linear(x, self.weight, self.bias)
        out = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)


def _as_one(tensors: list[Tensor]) -> Tensor | None:
    """All of them along the first axis; each becomes a view of the whole."""
    if len(tensors) < 2:
        return tensors[0].detach() if tensors else None
    whole = torch.cat([tensor.detach() for tensor in tensors])
    for tensor, view in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = view
    return whole


class StaticAttention(nn.Module):
    """Attention of one new token a row over what is held, itself included; called as Attention is."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        self.joint = FusedLinear([attention.query, attention.key, attention.value])
        self.output = _alone(attention.output)
        self.kernels = triton_works(self.joint.weight.device)

    def forward(
        self,
        x: Tensor,
        mask: None,
        encoder_output: None = None,
        rotation: Rope | None = None,
        cache: StaticKV | None = None,
    ) -> Tensor:
        """x (B, 1, D) to (B, 1, D); the token's key and value go to their places."""
        assert cache is not None
        heads = self.joint(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))  # (B, 1, H + 2G, E)
        if self.kernels and kernel_supports(heads[:, 0], cache.keys):
            found = triton_decode_attention(heads[:, 0], rotation, cache.keys, cache.values, cache.lengths)
            return self.output(found.reshape(len(x), 1, -1))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if rotation is not None:
            q, k = apply_rope(q, rotation), apply_rope(k, rotation)
        rows = torch.arange(len(x), device=x.device)
        cache.keys[rows, :, cache.lengths] = k[:, 0]
        cache.values[rows, :, cache.lengths] = v[:, 0]
        if torch.compiler.is_compiling() and len(x) * self.kv_heads < BUSY:
            found = cached_attention(q[:, 0], cache)
        else:  # a row's heads share a mask, and each one sees itself
            found = sdpa(q.transpose(1, 2), cache.keys, cache.values, cache.hidden, no_empty_rows=True)
        return self.output(found.reshape(len(x), 1, -1).to(x.dtype))


def cached_attention(q: Tensor, held: StaticKV) -> Tensor:
    """The formula of attention for q (B, H, E), to (B, H, E), written as sums that a compiler cuts up along the slots.

    With few rows there are fewer heads than multiprocessors, and kernels that give each head to one of them crawl.
    """
    q = q.to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[-1])
    q = q.unflatten(1, (held.keys.shape[1], -1))  # (B, G, H/G, E)
    scores = (q[:, :, :, None] * held.keys[:, :, None]).sum(dim=-1) + held.hidden  # (B, G, H/G, C)
    weighed = scores.softmax(dim=-1)[..., None] * held.values[:, :, None]  # (B, G, H/G, C, E)
    if weighed.shape[3] > MANY:
        weighed = weighed.unflatten(3, (-1, CHUNK)).sum(dim=4)  # (B, G, H/G, C/chunk, E)
    return weighed.sum(dim=3).flatten(1, 2)


class StaticFeedForward(nn.Module):
    """silu(gate(x)) · up(x), the two read at once."""

    def __init__(self, feed_forward: FeedForward):
        super().__init__()
        assert feed_forward.gate is not None
        self.joint = FusedLinear([feed_forward.gate, feed_forward.up])
        self.activation, self.down = feed_forward.activation, _alone(feed_forward.down)
        self.gate, self.up = _alone(feed_forward.gate), _alone(feed_forward.up)  # views of the joint one

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, D) to (B, 1, D)."""
        if torch.compiler.is_compiling() and len(x) == 1:  # two sums over one vector, which a compiler makes one kernel
            return self.down(self.activation(self.gate(x)) * self.up(x))
        gate, up = self.joint(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


def _alone(product: Product) -> nn.Module:
    """A product that has no other beside it."""
    return FusedLinear([product])


def can_be_static(network: nn.Module) -> TypeGuard[Decoder]:
    """Whether there is such a twin: of a decoder that looks at everything, its weights whole or in 8 bits."""
    if not isinstance(network, Decoder) or set(network.config.attention) != {"full"}:
        return False
    if network.heads.lm_head is None or type(network.heads.lm_head.proj) not in (nn.Linear, QuantizedLinear):
        return False
    return not any(isinstance(module, QuantizedLinear) and module.bits != 8 for module in network.modules())


def joined(network: Decoder) -> Decoder:
    """The twin, which shares all numbers with the network; its layers take a `Held` in the place of a cache."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    twin = copy.deepcopy(network, shared)
    layer: Any
    for layer in twin.decoder.layers:
        layer.attention = StaticAttention(layer.attention)
        forward = layer.feed_forward
        if forward.gate is not None:
            layer.feed_forward = StaticFeedForward(forward)
        else:
            forward.up, forward.down = _alone(forward.up), _alone(forward.down)
    assert twin.heads.lm_head is not None
    twin.heads.lm_head.proj = _alone(twin.heads.lm_head.proj)  # type: ignore[assignment]
    return twin
