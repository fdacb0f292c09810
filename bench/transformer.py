"""torch.nn.Transformer with embeddings, positions and loss: the translation peer of bench.train."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.config import ModelConfig


class Peer(nn.Module):
    """Our translation model from torch.nn parts: sinusoidal positions and one tied embedding."""

    def __init__(self, vocabulary: int, config: ModelConfig):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.dim)
        self.transformer = nn.Transformer(
            config.dim, config.heads, config.encoder_layers, config.decoder_layers, config.ff_dim,
            dropout=config.dropout, batch_first=True,
        )  # fmt: skip
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # as in the paper and in ours: no dropout on attention weights
        frequencies = torch.exp(torch.arange(0, config.dim, 2) * (-torch.log(torch.tensor(10000.0)) / config.dim))
        angles = torch.arange(config.max_positions)[:, None] * frequencies
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.dropout, self.scale = nn.Dropout(config.dropout), config.dim**0.5

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids (B, T) to (B, T, D)."""
        return self.dropout(self.embedding(ids) * self.scale + self.positions[: ids.shape[1]])

    def forward(self, source: Tensor, target: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        padding = torch.arange(source.shape[1], device=source.device) >= lengths[:, None]
        future = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=source.device, dtype=torch.bool)
        hidden = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=future, src_key_padding_mask=padding,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return self.score(hidden, labels)

    def score(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the decoder's hidden states."""
        logits = F.linear(hidden, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, label_smoothing=0.1)
