"""The three families: encoder-decoder (2017), encoder (BERT), decoder (GPT, Llama).

B batch · T tokens · S source tokens · N packed tokens · D model dim · V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model.cache import KVCache
from clearhead.model.heads import Heads
from clearhead.model.init_weights import init_weights
from clearhead.model.stack import Stack
from clearhead.ops.masks import Documents, Mask


class Network(nn.Module):
    """Base class of the families: one or two stacks, and the heads on the last one."""

    encoder: Stack
    decoder: Stack

    def __init__(self, config: ModelConfig, **stacks: Stack):
        super().__init__()
        self.config = config
        for name, stack in stacks.items():
            self.add_module(name, stack)
        self.heads = Heads(config)
        self.tie()
        self.register_load_state_dict_post_hook(lambda network, _: network.tie())  # type: ignore[no-untyped-call]

    def tie(self) -> None:
        """Tie the matrices that `config.tie` names (section 3.4); loading and moving untie them, so both call this."""
        encoder = getattr(self, "encoder", None)
        matrix = (getattr(self, "decoder", None) or self.encoder).embedding.tokens.weight  # (V, D)
        if self.config.tie == "all" and encoder is not None:
            encoder.embedding.tokens.weight = matrix
        lm_head = self.heads.lm_head
        if self.config.tie != "none" and lm_head is not None and isinstance(lm_head.proj, nn.Linear):
            lm_head.proj.weight = matrix

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states: (B, T, D) to (B, T, V)."""
        if self.heads.lm_head is None:
            outputs = ", ".join(self.config.outputs) or "hidden states"
            raise ValueError(
                f"outputs: this model has no lm_head, only {outputs}; call encode or decode, or build with outputs=lm"
            )
        return self.heads.lm_head(hidden)


class Encoder(Network):
    """A bidirectional encoder (BERT): hidden states for masked tokens, classes, tags and spans."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, encoder=Stack(config, causal=False))

    def encode(
        self,
        ids: Tensor,
        lengths: Tensor | None = None,
        *,
        documents: Documents | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """ids (B, T) to hidden states (B, T, D)."""
        return self.encoder(ids, lengths, documents=documents, segments=segments)

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | None = None,
        *,
        documents: Documents | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """ids (B, T) to logits (B, T, V)."""
        return self.logits(self.encode(ids, lengths, documents=documents, segments=segments))


class Decoder(Network):
    """A causal decoder (GPT, Llama)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, decoder=Stack(config, causal=True))

    def decode(
        self,
        ids: Tensor,
        lengths: Tensor | None = None,
        *,
        documents: Documents | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """ids (B, T) to hidden states (B, T, D); with a cache, ids continue the cached tokens."""
        return self.decoder(ids, lengths, documents=documents, cache=cache)

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | None = None,
        *,
        documents: Documents | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """ids (B, T) to logits of the next token (B, T, V)."""
        return self.logits(self.decode(ids, lengths, documents=documents, cache=cache))


@dataclass(frozen=True)
class EncoderOutput:
    """Hidden states of a source, with the lengths of a padded batch or the documents of a packed row."""

    hidden_states: Tensor  # (B, S, D), or (1, N, D) packed
    lengths: Tensor | None = None  # (B,)
    documents: Documents | None = None


class EncoderDecoder(Network):
    """The 2017 translator: an encoder of the source, and a decoder of the target with cross-attention to it."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, encoder=Stack(config, causal=False), decoder=Stack(config, causal=True, cross=True))

    def encode(
        self, source: Tensor, lengths: Tensor | None = None, *, documents: Documents | None = None
    ) -> EncoderOutput:
        """Source ids (B, S) to the encoder output."""
        return EncoderOutput(self.encoder(source, lengths, documents=documents), lengths, documents)

    def decode(
        self,
        target: Tensor,
        encoder_output: EncoderOutput | None,
        lengths: Tensor | None = None,
        *,
        documents: Documents | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Target ids (B, T) to hidden states (B, T, D).

        With a cache, `encoder_output` is needed at the first step only; later steps may pass None.
        """
        hidden = None if encoder_output is None else encoder_output.hidden_states
        mask = self._cross_mask(target, encoder_output, documents, cache)
        return self.decoder(target, lengths, documents=documents, encoder_output=hidden, cross_mask=mask, cache=cache)

    def _cross_mask(
        self, target: Tensor, encoder_output: EncoderOutput | None, documents: Documents | None, cache: KVCache | None
    ) -> Mask:
        """Return the cross-attention mask, from the encoder output at the first step, else from the cache."""
        if cache is not None and cache.source is not None:
            if encoder_output is not None and encoder_output is not cache.source:
                raise ValueError("cache: it belongs to another source; make a new cache for each source")
            return Mask(lengths=cache.source_lengths)
        if encoder_output is None:
            raise ValueError("encoder_output: None is for a cache that already holds the source; pass encode(source)")
        if (documents is None) != (encoder_output.documents is None):
            raise ValueError("documents: only one of source and target is packed; pack both or neither")
        if documents is not None and encoder_output.documents is not None:
            sources, targets = len(encoder_output.documents.lengths), len(documents.lengths)
            if sources != targets:
                raise ValueError(f"documents: {sources} in the source, but {targets} in the target; give equally many")
            return Mask(documents=(documents, encoder_output.documents))
        if len(encoder_output.hidden_states) != len(target):
            raise ValueError(
                f"target: {len(encoder_output.hidden_states)} rows of source, but {len(target)} of target; "
                "give equally many"
            )
        if cache is not None:
            lengths = None if encoder_output.lengths is None else encoder_output.lengths.long().contiguous()
            cache.source, cache.source_lengths = encoder_output, lengths
        return Mask(lengths=encoder_output.lengths)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        *,
        source_documents: Documents | None = None,
        target_documents: Documents | None = None,
    ) -> Tensor:
        """Source ids (B, S) and target ids (B, T) to logits of the next target token (B, T, V)."""
        encoder_output = self.encode(source, source_lengths, documents=source_documents)
        return self.logits(self.decode(target, encoder_output, target_lengths, documents=target_documents))


FAMILIES: dict[str, type[Network]] = {"encoder-decoder": EncoderDecoder, "encoder": Encoder, "decoder": Decoder}


def build(config: ModelConfig, device: torch.device | str | None = None) -> Network:
    """Build the network of a config with newly initialized weights; on the device `meta`, without weights."""
    if not isinstance(config, ModelConfig):
        raise UserError(f"build: {type(config).__name__} is not a ModelConfig; get one with preset('tiny-gpt')")
    with torch.device(device or torch.get_default_device()):
        network = FAMILIES[config.family](config)
    if not next(network.parameters()).is_meta:
        init_weights(network, config)
    return network
