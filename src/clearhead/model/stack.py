"""A stack of layers with its embedding: the encoder or the decoder of a model.   B rows · T tokens · D width"""

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.cache import KVCache
from clearhead.model.embedding import Embedding
from clearhead.model.layer import Layer
from clearhead.model.norms import build_norm
from clearhead.model.positions import rope_cos_sin
from clearhead.ops.masks import Documents, Mask, patterns


class Stack(nn.Module):
    """Ids to hidden states. The encoder sees both ways; the decoder looks back, and at the source if there is one."""

    def __init__(self, config: ModelConfig, causal: bool, cross: bool = False):
        super().__init__()
        self.config, self.causal = config, causal
        layers = config.decoder_layers if causal else config.encoder_layers
        self.embedding = Embedding(config, config.target_vocab if causal else config.source_vocab)
        self.layers = nn.ModuleList(Layer(config, pattern, cross) for pattern in patterns(config, layers))
        self.norm = (
            build_norm(config) if config.norm_position == "pre" else None
        )  # what post-norm layers end with anyway

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | None = None,
        *,
        documents: Documents | None = None,
        segments: Tensor | None = None,
        encoder_output: Tensor | None = None,
        cross_mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """ids (B, T) to hidden states (B, T, D).

        Either `lengths` (B,) says how many tokens of each row are real, or `documents` what the one packed row holds.
        """
        positions, mask = self._layout(ids, lengths, documents, cache)
        rotation = rope_cos_sin(self.config, positions) if self.config.position == "rotary" else None
        real = None
        if lengths is not None and self.config.norm == "batch":
            real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]  # (B, T)
        x = self.embedding(ids, positions, segments, real)
        for number, layer in enumerate(self.layers):
            x = layer(
                x, mask, rotation, encoder_output, cross_mask, None if cache is None else cache.layers[number], real
            )
        if cache is not None:
            cache.advance(ids.shape[1], lengths)
        return x if self.norm is None else self.norm(x, real)

    def _layout(
        self, ids: Tensor, lengths: Tensor | None, documents: Documents | None, cache: KVCache | None
    ) -> tuple[Tensor, Mask]:
        """The position of every token, (B or 1, T), and what it may look at."""
        if ids.dim() != 2:
            raise ValueError(f"ids: expected (rows, tokens), got {tuple(ids.shape)}; one row is ids[None]")
        if lengths is not None and getattr(lengths, "shape", None) != ids.shape[:1]:
            raise ValueError(f"lengths: expected a tensor with one number for each of {len(ids)} rows; got {lengths!r}")
        tokens = ids.shape[1]
        max_length = documents.max_length if documents else tokens
        if max_length > self.config.max_positions and cache is None:
            raise ValueError(
                f"a sequence of {max_length} tokens is longer than max_positions {self.config.max_positions}"
            )
        if documents is not None:
            if lengths is not None or cache is not None:
                raise ValueError("a packed row has neither padding nor a cache")
            if ids.shape != (1, documents.total):
                raise ValueError(f"the documents have {documents.total} tokens together, ids are {tuple(ids.shape)}")
            return documents.positions[None], Mask(self.causal, documents=(documents, documents))
        if cache is not None:
            if cache.config is not self.config and cache.config != self.config:
                raise ValueError("the cache was made for a model of another config; make one with network.config")
            return cache.begin(ids, lengths)
        return torch.arange(tokens, device=ids.device)[None], Mask(self.causal, lengths=lengths)
