"""Token ids to vectors: token, position and segment embeddings, summed.   B rows · T tokens · D width"""

import math

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.norms import build_norm
from clearhead.model.positions import sinusoidal_positions


class Embedding(nn.Module):
    """The vector each token enters the first layer with (sections 3.4 and 3.5; BERT adds segments and a norm)."""

    def __init__(self, config: ModelConfig, vocabulary: int):
        super().__init__()
        self.scale = math.sqrt(config.dim) if config.scale_embedding else 1.0
        self.sinusoid = config.sinusoid  # None unless positions are sinusoidal
        self.tokens = _table(vocabulary, config.dim)
        self.positions = _table(config.max_positions, config.dim) if config.position == "learned" else None
        self.segments = _table(config.segments, config.dim) if config.segments else None
        self.norm = build_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, ids: Tensor, positions: Tensor, segments: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        """ids (B, T) and positions (B or 1, T) to (B, T, D); no segments given means segment 0 everywhere."""
        try:
            x = self.tokens(ids)
        except IndexError:  # on a CPU; a GPU stops with its own assertion
            raise ValueError(f"ids: one is outside the vocabulary of {self.tokens.num_embeddings} tokens") from None
        if self.scale != 1.0:
            x = x * self.scale
        if self.positions is not None:
            x = self.add_positions(x, self.positions(positions))
        if self.sinusoid is not None:
            x = x + sinusoidal_positions(positions, x.shape[-1], self.sinusoid).type_as(x)
        if self.segments is None and segments is not None:
            raise ValueError("segments: this model has none; leave them out, or build it with segments=2")
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        if self.norm is not None:
            x = self.norm(x, padding_mask)
        return self.dropout(x)

    def add_positions(self, x: Tensor, place: Tensor) -> Tensor:
        """The vectors of tokens (B, T, D) and of positions (B or 1, T, D), summed."""
        return x + place


def _table(rows: int, dim: int) -> nn.Embedding:
    """An embedding that `initialize` will draw; torch's own drawing only takes time, on the meta device a second."""
    return nn.Embedding.from_pretrained(torch.empty(rows, dim), freeze=False)
