"""Attention with fused QKV and feed-forward with fused gate and up projections.

B batch · T tokens · S source tokens · D model dim · H heads · G key-value heads · E head dim
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.model.attention import Attention, Rope
from clearhead.model.feedforward import FeedForward
from clearhead.model.positions import apply_rope


class FusedAttention(Attention):
    """Attention with one linear for queries, keys and values; in cross-attention one for keys and values."""

    def __init__(self, attention: Attention):
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.pattern = attention.heads, attention.kv_heads, attention.pattern
        self.is_cross, self.dropout, self.training = attention.is_cross, attention.dropout, attention.training
        if self.is_cross:
            self.query, self.kv = attention.query, _fuse(attention.key, attention.value)
        else:
            self.qkv = _fuse(attention.query, attention.key, attention.value)
        self.query_norm, self.key_norm, self.output = attention.query_norm, attention.key_norm, attention.output

    def project_qkv(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, E), keys and values (B, G, T, E) of x (B, T, D)."""
        heads = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))  # (B, T, H + 2G, E)
        if self.query_norm is not None and self.key_norm is not None:
            q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            heads = torch.cat([self.query_norm(q), self.key_norm(k), v], dim=2)
        if rope is not None:
            qk, v = heads.tensor_split((self.heads + self.kv_heads,), dim=2)
            heads = torch.cat([apply_rope(qk, rope), v], dim=2)
        q, k, v = heads.transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v

    def project_q(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """(B, T, D) to (B, H, T, E)."""
        return super().project_q(x) if self.is_cross else self.project_qkv(x, rope)[0]

    def project_kv(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        """(B, S, D) to (B, G, S, E) twice."""
        if not self.is_cross:
            return self.project_qkv(x, rope)[1:]
        k, v = self.kv(x).unflatten(-1, (2 * self.kv_heads, -1)).transpose(1, 2).chunk(2, dim=1)
        return k if self.key_norm is None else self.key_norm(k), v


class FusedFeedForward(FeedForward):
    """Feed-forward in which `up` includes the gate projection, if any; relu runs in place."""

    def __init__(self, feed_forward: FeedForward):
        nn.Module.__init__(self)
        relu = feed_forward.activation is F.relu
        self.activation = torch.relu_ if relu else feed_forward.activation
        self.is_gated, self.training = feed_forward.gate is not None, feed_forward.training
        gate, up = feed_forward.gate, feed_forward.up
        self.up = up if gate is None else _fuse(gate, up)
        self.down = feed_forward.down

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        hidden = self.up(x)
        if self.is_gated:
            gate, up = hidden.chunk(2, dim=-1)
            return self.down(self.activation(gate) * up)
        return self.down(self.activation(hidden))


def _fuse(*layers: nn.Linear) -> nn.Linear:
    """Concatenate the outputs of linear layers with the same input."""
    first = layers[0]
    outputs = sum(layer.out_features for layer in layers)
    fused = nn.Linear(first.in_features, outputs, bias=False, device="meta")
    fused.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), False)
    if first.bias is not None:
        fused.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), False)
    return fused
