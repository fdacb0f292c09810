"""The encoder or decoder stack: embedding, layers, final norm.   B batch · T tokens · S source tokens · D model dim"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.cache import KVCache, LayerKVCache
from clearhead.model.embedding import Embedding
from clearhead.model.layer import Layer
from clearhead.model.norms import build_norm
from clearhead.model.positions import rope_cos_sin
from clearhead.ops.masks import Documents, Mask, patterns


class Stack(nn.Module):
    """Token ids to hidden states (section 3.1): a bidirectional encoder, or a causal decoder with `causal=True`."""

    def __init__(self, config: ModelConfig, causal: bool, cross: bool = False):
        super().__init__()
        self.config, self.causal = config, causal
        layers = config.decoder_layers if causal else config.encoder_layers
        self.embedding = Embedding(config, config.target_vocab if causal else config.source_vocab)
        self.patterns = patterns(config, layers)
        self.layers = nn.ModuleList(
            Layer(config, pattern, cross, attention_norm=config.first_norm or number > 0)
            for number, pattern in enumerate(self.patterns)
        )
        self.norm = build_norm(config) if config.norm_position == "pre" else None  # a post-norm layer ends with a norm

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
        """Map ids (B, T) to hidden states (B, T, D).

        A padded batch has `lengths` (B,), the tokens of each row without padding; a packed row has `documents`.
        """
        positions, mask = self._positions_and_mask(ids, lengths, documents, cache)
        rope = rope_cos_sin(self.config, positions) if self.config.position == "rotary" else None
        theta = self.config.local_rope_theta
        local_rope = rope if theta is None else rope_cos_sin(self.config, positions, theta)
        norm_mask = None
        if lengths is not None and self.config.norm == "batch":  # the only norm over several tokens
            norm_mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]  # (B, T)
        x = self.embedding(ids, positions, segments, norm_mask)  # (B, T, D)
        caches: Sequence[LayerKVCache | None] = [None] * len(self.layers) if cache is None else cache.layers
        for layer, pattern, layer_cache in zip(self.layers, self.patterns, caches, strict=True):
            layer_rope = local_rope if pattern.kind == "window" else rope
            x = layer(x, mask, layer_rope, encoder_output, cross_mask, layer_cache, norm_mask)
        if cache is not None:
            cache.advance(ids.shape[1], lengths)
        return x if self.norm is None else self.norm(x, norm_mask)

    def _positions_and_mask(
        self, ids: Tensor, lengths: Tensor | None, documents: Documents | None, cache: KVCache | None
    ) -> tuple[Tensor, Mask]:
        """Return the position of every token, (B or 1, T), and the self-attention mask."""
        if ids.dim() != 2:
            raise ValueError(f"ids: expected shape (batch, tokens), got {tuple(ids.shape)}; for one row use ids[None]")
        if lengths is not None and getattr(lengths, "shape", None) != ids.shape[:1]:
            raise ValueError(f"lengths: expected a tensor with one number for each of {len(ids)} rows; got {lengths!r}")
        tokens = ids.shape[1]
        max_length = documents.max_length if documents else tokens
        if max_length > self.config.max_positions and cache is None:
            raise ValueError(
                f"ids: a sequence of {max_length} tokens is longer than max_positions {self.config.max_positions}; "
                "truncate it"
            )
        if documents is not None:
            if lengths is not None or cache is not None:
                raise ValueError("documents: a packed row has neither padding nor a cache; leave out lengths and cache")
            if ids.shape != (1, documents.total):
                raise ValueError(
                    f"documents: lengths add up to {documents.total} tokens, but ids are {tuple(ids.shape)}; "
                    f"pack them as (1, {documents.total})"
                )
            return documents.positions[None], Mask(self.causal, documents=(documents, documents))
        if cache is not None:
            if cache.config is not self.config and cache.config != self.config:
                raise ValueError("cache: it was made for a model of another config; use KVCache(network.config, …)")
            return cache.begin(ids, lengths)
        return torch.arange(tokens, device=ids.device)[None], Mask(self.causal, lengths=lengths)
