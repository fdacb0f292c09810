"""Token, position and segment embeddings, summed.   B batch · T tokens · D model dim"""

import math

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.norms import build_norm
from clearhead.model.positions import sinusoidal_positions


class Embedding(nn.Module):
    """Input embedding (sections 3.4 and 3.5); BERT adds segments and a norm."""

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        self.scale = math.sqrt(config.dim) if config.scale_embedding else 1.0
        self.sinusoid = config.sinusoid  # None unless positions are sinusoidal
        self.tokens = _empty_embedding(vocab_size, config.dim)
        self.position_offset, rows = config.position_offset, config.max_positions + config.position_offset
        self.positions = _empty_embedding(rows, config.dim) if config.position == "learned" else None
        self.segments = _empty_embedding(config.segments, config.dim) if config.segments else None
        self.norm = build_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, ids: Tensor, positions: Tensor, segments: Tensor | None = None, norm_mask: Tensor | None = None
    ) -> Tensor:
        """Embed ids (B, T) at positions (B or 1, T): (B, T, D). Without `segments` every token is in segment 0."""
        try:
            x = self.tokens(ids)  # (B, T, D)
        except IndexError:  # raised on a CPU; CUDA fails with a device-side assertion of its own
            size = self.tokens.num_embeddings
            raise ValueError(f"ids: a token id is outside the vocabulary of {size} tokens") from None
        if self.scale != 1.0:
            x = x * self.scale
        if self.position_offset:
            positions = positions + self.position_offset
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.sinusoid is not None:
            x = x + sinusoidal_positions(positions, x.shape[-1], self.sinusoid).type_as(x)
        if self.segments is None and segments is not None:
            raise ValueError("segments: this model has none; leave them out, or build it with segments=2")
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        if self.norm is not None:
            x = self.norm(x, norm_mask)
        return self.dropout(x)


def _empty_embedding(entries: int, dim: int) -> nn.Embedding:
    """Skip nn.Embedding's own initialization; `init_weights` does it."""
    return nn.Embedding.from_pretrained(torch.empty(entries, dim), freeze=False)
