"""Multi-head attention: self or cross, multi-head or grouped-query, with or without rotary positions and a KV cache.

B batch · T queries · S keys · D model dim · H heads · G key-value heads · E head dim
"""

from dataclasses import replace

from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.cache import LayerKVCache
from clearhead.model.norms import RMSNorm
from clearhead.model.positions import apply_rope
from clearhead.ops.attention import attend
from clearhead.ops.masks import FULL, Mask, Pattern

Rope = tuple[Tensor, Tensor]  # cosines and sines, see positions.rope_cos_sin


class Attention(nn.Module):
    """Multi-head attention (section 3.2.2): project to heads, attend in each, merge, project back.

    G = H is multi-head attention, G = 1 multi-query attention, anything between grouped-query attention.
    """

    def __init__(self, config: ModelConfig, pattern: Pattern = FULL, cross: bool = False):
        super().__init__()
        self.heads, self.kv_heads, self.pattern, self.is_cross = config.heads, config.kv_heads, pattern, cross
        self.dropout = config.attention_dropout
        q_dim, kv_dim = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, q_dim, bias=config.qkv_bias)
        self.key = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.value = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.output = nn.Linear(q_dim, config.dim, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        encoder_output: Tensor | None = None,
        rope: Rope | None = None,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Attend from x (B, T, D) to itself and the cached tokens, or to `encoder_output` (B, S, D): (B, T, D)."""
        if self.is_cross:
            q, (k, v) = self.project_q(x), self._source_kv(encoder_output, cache)
        else:
            q, k, v = self.project_qkv(x, rope)
            if cache is not None:
                k, v = cache.extend(k, v)
        return self.merge_heads(self.attend(q, k, v, mask))

    def _source_kv(self, encoder_output: Tensor | None, cache: LayerKVCache | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of the source, (B, G, S, E) each; with a cache they are computed once."""
        if cache is not None and cache.source is not None:
            return cache.source
        assert encoder_output is not None, "cross-attention needs an encoder output"
        k, v = self.project_kv(encoder_output)
        if cache is not None:  # read at every following step, so worth laying out contiguously
            cache.source = k, v = k.contiguous(), v.contiguous()
        return k, v

    def project_qkv(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, E), keys and values (B, G, T, E) of x (B, T, D)."""
        return self.project_q(x, rope), *self.project_kv(x, rope)

    def project_q(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """Return queries: (B, T, D) to (B, H, T, E)."""
        return split_heads(self.query(x), self.heads, self.query_norm, rope)

    def project_kv(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values: (B, S, D) to (B, G, S, E) each; only keys are normalized and rotated."""
        k = split_heads(self.key(x), self.kv_heads, self.key_norm, rope)
        return k, split_heads(self.value(x), self.kv_heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Per-head attention output: (B, H, T, E)."""
        if self.pattern.kind != "full":
            mask = replace(mask, pattern=self.pattern)
        return attend(q, k, v, mask, self.dropout if self.training else 0.0)

    def merge_heads(self, heads: Tensor) -> Tensor:
        """Concatenate the heads and project back: (B, H, T, E) to (B, T, D)."""
        return self.output(heads.transpose(1, 2).flatten(2))  # (B, T, H·E) to (B, T, D)


def split_heads(x: Tensor, heads: int, norm: RMSNorm | None = None, rope: Rope | None = None) -> Tensor:
    """Split x (B, T, H·E) into heads (B, H, T, E), as a view; `norm` normalizes and `rope` rotates them."""
    x = x.unflatten(-1, (heads, -1))  # (B, T, H, E)
    x = x if norm is None else norm(x)
    return (x if rope is None else apply_rope(x, rope)).transpose(1, 2)  # (B, H, T, E)
