"""Attention and feed-forward with one matrix product where several read the same input.

B rows · T tokens · S keys · D width · H heads · G key-value heads · E head width
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.model.attention import Attention, Rope
from clearhead.model.feedforward import FeedForward
from clearhead.model.positions import apply_rope


class FusedAttention(Attention):
    """Attention with one product for queries, keys and values, in cross-attention one for keys and values."""

    def __init__(self, plain: Attention):
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.pattern = plain.heads, plain.kv_heads, plain.pattern
        self.is_cross, self.dropout, self.training = plain.is_cross, plain.dropout, plain.training
        if self.is_cross:
            self.query, self.joined = plain.query, _joined(plain.key, plain.value)
        else:
            self.joined = _joined(plain.query, plain.key, plain.value)
        self.output = plain.output

    def project_qkv(self, x: Tensor, rotation: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, E), keys and values (B, G, T, E) of the same tokens."""
        heads = self.joined(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))  # (B, T, H + 2G, E)
        if rotation is not None:
            turning, still = heads.tensor_split((self.heads + self.kv_heads,), dim=2)
            heads = torch.cat([apply_rope(turning, rotation), still], dim=2)
        q, k, v = heads.transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v

    def project_q(self, x: Tensor, rotation: Rope | None = None) -> Tensor:
        """(B, T, D) to (B, H, T, E)."""
        return super().project_q(x) if self.is_cross else self.project_qkv(x, rotation)[0]

    def project_kv(self, x: Tensor, rotation: Rope | None = None) -> tuple[Tensor, Tensor]:
        """(B, S, D) to (B, G, S, E) twice."""
        if not self.is_cross:
            return self.project_qkv(x, rotation)[1:]
        k, v = self.joined(x).unflatten(-1, (2 * self.kv_heads, -1)).transpose(1, 2).chunk(2, dim=1)
        return k, v


class FusedFeedForward(FeedForward):
    """The feed-forward with one product for the gate and its partner, and relu in place."""

    def __init__(self, plain: FeedForward):
        nn.Module.__init__(self)
        self.activation = torch.relu_ if plain.activation is F.relu else plain.activation
        self.is_gated, self.training = plain.gate is not None, plain.training
        self.joined = plain.up if plain.gate is None else _joined(plain.gate, plain.up)
        self.down = plain.down

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        hidden = self.joined(x)
        if self.is_gated:
            gate, up = hidden.chunk(2, dim=-1)
            return self.down(self.activation(gate) * up)
        return self.down(self.activation(hidden))


def _joined(*layers: nn.Linear) -> nn.Linear:
    """Layers that read the same input as one, the outputs side by side."""
    first = layers[0]
    outputs = sum(layer.out_features for layer in layers)
    joined = nn.Linear(first.in_features, outputs, bias=False, device="meta")
    joined.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), False)
    return joined
