"""The three families, composed of two stacks and what is read off them.

B rows · T tokens · S source tokens · D width · V words
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.cache import KVCache
from clearhead.model.heads import Heads
from clearhead.model.init_weights import init_weights
from clearhead.model.stack import Stack
from clearhead.ops.masks import Documents, Mask


class Network(nn.Module):
    """What the families share: one or two stacks, heads, and word scores from hidden states."""

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
        """Let the matrices that the config ties be one; loading and moving can part them, so both call this again."""
        reads, writes = getattr(self, "encoder", None), getattr(self, "decoder", None) or self.encoder
        matrix = writes.embedding.tokens.weight
        if self.config.tie == "all" and reads is not None:
            reads.embedding.tokens.weight = matrix
        words = self.heads.lm_head
        if self.config.tie != "none" and words is not None and isinstance(words.proj, nn.Linear):
            words.proj.weight = matrix

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def logits(self, hidden: Tensor) -> Tensor:
        """The score of every word at every position: (B, T, D) to (B, T, V)."""
        if self.heads.lm_head is None:
            gives = ", ".join(self.config.outputs) or "hidden states"
            raise ValueError(f"this model gives {gives}, no words; call encode or decode, or build it with outputs=lm")
        return self.heads.lm_head(hidden)


class Encoder(Network):
    """Reads both ways (BERT): a hidden state for every token, for filling gaps, classes, tags, spans."""

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
        """The score of every word at every position: (B, T, V)."""
        return self.logits(self.encode(ids, lengths, documents=documents, segments=segments))


class Decoder(Network):
    """Looks back only (GPT, Llama): at every position, the score of every next word."""

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
        """ids (B, T) to hidden states (B, T, D); with a cache, ids are what comes after the tokens it holds."""
        return self.decoder(ids, lengths, documents=documents, cache=cache)

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | None = None,
        *,
        documents: Documents | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The score of every next word at every position: (B, T, V)."""
        return self.logits(self.decode(ids, lengths, documents=documents, cache=cache))


@dataclass(frozen=True)
class EncoderOutput:
    """An encoded source, and which of its positions are real."""

    hidden_states: Tensor  # (B, S, D), or (1, N, D) packed
    lengths: Tensor | None = None
    documents: Documents | None = None


class EncoderDecoder(Network):
    """Reads a source and writes a target (the 2017 translator)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, encoder=Stack(config, causal=False), decoder=Stack(config, causal=True, cross=True))

    def encode(
        self, source: Tensor, lengths: Tensor | None = None, *, documents: Documents | None = None
    ) -> EncoderOutput:
        """Source ids (B, S), read both ways."""
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
        """Target ids (B, T) to hidden states (B, T, D), looking at the source.

        With a cache, the source is needed at the first step only; later steps may give None.
        """
        hidden = None if encoder_output is None else encoder_output.hidden_states
        mask = self._source_mask(target, encoder_output, documents, cache)
        return self.decoder(target, lengths, documents=documents, encoder_output=hidden, cross_mask=mask, cache=cache)

    def _source_mask(
        self, target: Tensor, encoder_output: EncoderOutput | None, documents: Documents | None, cache: KVCache | None
    ) -> Mask:
        """Which positions of the source are real, from the memory or, once it has been seen, from the cache."""
        if cache is not None and cache.source is not None:
            if encoder_output is not None and encoder_output is not cache.source:
                raise ValueError("this cache belongs to another source; make a new cache for a new source")
            return Mask(lengths=cache.source_lengths)
        if encoder_output is None:
            raise ValueError("decode needs the encoded source, or a cache that has already seen it")
        if (documents is None) != (encoder_output.documents is None):
            raise ValueError("pack source and target both, or neither")
        if documents is not None and encoder_output.documents is not None:
            if len(documents.lengths) != len(encoder_output.documents.lengths):
                raise ValueError(
                    f"{len(encoder_output.documents.lengths)} source documents, but {len(documents.lengths)} of the target"
                )
            return Mask(documents=(documents, encoder_output.documents))
        if len(encoder_output.hidden_states) != len(target):
            raise ValueError(f"{len(encoder_output.hidden_states)} rows of source, but {len(target)} of target")
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
        """The score of every next target word at every position: (B, T, V)."""
        encoder_output = self.encode(source, source_lengths, documents=source_documents)
        return self.logits(self.decode(target, encoder_output, target_lengths, documents=target_documents))


FAMILIES: dict[str, type[Network]] = {"encoder-decoder": EncoderDecoder, "encoder": Encoder, "decoder": Decoder}


def build(config: ModelConfig, device: torch.device | str | None = None) -> Network:
    """The network that a config describes, with fresh weights; on the device `meta` it has shapes and no numbers."""
    with torch.device(device or torch.get_default_device()):
        network = FAMILIES[config.family](config)
    if torch.device(device or torch.get_default_device()).type != "meta":
        init_weights(network, config)
    return network
