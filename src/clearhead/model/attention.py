"""Multi-head attention: self or cross, grouped or not, rotary or not, cached or not.

B rows · T queries · S keys · D width · H heads · G key-value heads · E head width
"""

from dataclasses import replace

from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.cache import LayerKVCache
from clearhead.model.positions import apply_rope
from clearhead.ops.attention.dispatch import attend
from clearhead.ops.masks import FULL, Mask, Pattern

Rope = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Section 3.2.2: project to heads, attend in each, join, project back.

    G = H is multi-head attention, G = 1 the single-key-value kind, anything between grouped-query attention.
    """

    def __init__(self, config: ModelConfig, pattern: Pattern = FULL, cross: bool = False):
        super().__init__()
        self.heads, self.kv_heads, self.pattern, self.is_cross = config.heads, config.kv_heads, pattern, cross
        self.dropout = config.attention_dropout
        inner, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, inner, bias=config.bias)
        self.key = nn.Linear(config.dim, shared, bias=config.bias)
        self.value = nn.Linear(config.dim, shared, bias=config.bias)
        self.output = nn.Linear(inner, config.dim, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        encoder_output: Tensor | None = None,
        rope: Rope | None = None,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        """x (B, T, D) looks at itself and what the cache holds or, in cross-attention, at `memory` (B, S, D)."""
        if self.is_cross:
            q, (k, v) = self.project_q(x), self._of_source(encoder_output, cache)
        else:
            q, k, v = self.project_qkv(x, rope)
            if cache is not None:
                k, v = cache.extend(k, v)
        return self.merge_heads(self.attend(q, k, v, mask))

    def _of_source(self, encoder_output: Tensor | None, cache: LayerKVCache | None) -> tuple[Tensor, Tensor]:
        """The keys and values of the source, computed once where there is a cache."""
        if cache is not None and cache.source is not None:
            return cache.source
        assert encoder_output is not None, "cross-attention needs an encoded source"
        k, v = self.project_kv(encoder_output)
        if cache is not None:  # read at every step from now on: each head's in one piece
            cache.source = k, v = k.contiguous(), v.contiguous()
        return k, v

    def project_qkv(self, x: Tensor, rotation: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, E), keys and values (B, G, T, E) of the same tokens."""
        return self.project_q(x, rotation), *self.project_kv(x, rotation)

    def project_q(self, x: Tensor, rotation: Rope | None = None) -> Tensor:
        """(B, T, D) to (B, H, T, E)."""
        return split_heads(self.query(x), self.heads, rotation)

    def project_kv(self, x: Tensor, rotation: Rope | None = None) -> tuple[Tensor, Tensor]:
        """(B, S, D) to (B, G, S, E) twice; keys turn with their positions, values do not."""
        return split_heads(self.key(x), self.kv_heads, rotation), split_heads(self.value(x), self.kv_heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """What each head brings home: (B, H, T, E)."""
        if self.pattern.kind != "full":
            mask = replace(mask, pattern=self.pattern)
        return attend(q, k, v, mask, self.dropout if self.training else 0.0)

    def merge_heads(self, heads: Tensor) -> Tensor:
        """(B, H, T, E) to (B, T, D)."""
        return self.output(heads.transpose(1, 2).flatten(2))


def split_heads(x: Tensor, heads: int, rotation: Rope | None = None) -> Tensor:
    """(B, T, H·E) to (B, H, T, E), as a view that every backend can reshape for free."""
    x = x.unflatten(-1, (heads, -1))  # (B, T, H, E)
    return (x if rotation is None else apply_rope(x, rotation)).transpose(1, 2)
