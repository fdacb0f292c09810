"""One Transformer layer: self-attention, cross-attention in a translator's decoder, feed-forward.

B batch · T tokens · S source tokens · D model dim
"""

from collections.abc import Callable

from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.attention import Attention, Rope
from clearhead.model.cache import LayerKVCache
from clearhead.model.feedforward import FeedForward
from clearhead.model.norms import NoNorm, build_norm
from clearhead.ops.masks import Mask, Pattern


class Layer(nn.Module):
    """Two or three sublayers, each with a residual connection, a norm and dropout (sections 3.1 and 5.4).

    post-norm, the 2017 paper:   x = norm(x + dropout(sublayer(x)))
    pre-norm, GPT-2 and later:   x = x + dropout(sublayer(norm(x)))
    """

    def __init__(self, config: ModelConfig, pattern: Pattern, cross: bool, attention_norm: bool = True):
        super().__init__()
        self.pre = config.norm_position == "pre"
        self.attention = Attention(config, pattern)
        self.attention_norm = build_norm(config) if attention_norm else NoNorm()
        self.cross_attention = Attention(config, cross=True) if cross else None
        self.cross_norm = build_norm(config) if cross else None
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout)

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
        """x (B, T, D) to (B, T, D); `encoder_output` (B, S, D), `norm_mask` (B, T)."""
        x = self._add(x, self.attention_norm, norm_mask, lambda h: self.attention(h, mask, None, rope, cache))
        if (cross := self.cross_attention) is not None and self.cross_norm is not None:
            x = self._add(x, self.cross_norm, norm_mask, lambda h: cross(h, cross_mask, encoder_output, None, cache))
        return self._add(x, self.feed_forward_norm, norm_mask, self.feed_forward)

    def _add(
        self, x: Tensor, norm: nn.Module, norm_mask: Tensor | None, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Add the output of a sublayer to x, with its norm and dropout."""
        if self.pre:
            return x + self.dropout(sublayer(norm(x, norm_mask)))
        return norm(x + self.dropout(sublayer(x)), norm_mask)
