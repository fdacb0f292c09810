"""The three families, composed of two stacks and what is read off them.

B rows · T tokens · S source tokens · D width · V words
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.cache import Cache
from clearhead.model.heads import Heads
from clearhead.model.init_weights import initialise
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
        words = self.heads.words
        if self.config.tie != "none" and words is not None and isinstance(words.scores, nn.Linear):
            words.scores.weight = matrix

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def words(self, hidden: Tensor) -> Tensor:
        """The score of every word at every position: (B, T, D) to (B, T, V)."""
        if self.heads.words is None:
            gives = ", ".join(self.config.outputs) or "hidden states"
            raise ValueError(
                f"this model gives {gives}, no words; call encode or decode, or build it with outputs=words"
            )
        return self.heads.words(hidden)


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
        return self.words(self.encode(ids, lengths, documents=documents, segments=segments))


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
        cache: Cache | None = None,
    ) -> Tensor:
        """ids (B, T) to hidden states (B, T, D); with a cache, ids are what comes after the tokens it holds."""
        return self.decoder(ids, lengths, documents=documents, cache=cache)

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | None = None,
        *,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The score of every next word at every position: (B, T, V)."""
        return self.words(self.decode(ids, lengths, documents=documents, cache=cache))


@dataclass(frozen=True)
class Memory:
    """An encoded source, and which of its positions are real."""

    hidden: Tensor  # (B, S, D), or (1, N, D) packed
    lengths: Tensor | None = None
    documents: Documents | None = None


class EncoderDecoder(Network):
    """Reads a source and writes a target (the 2017 translator)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, encoder=Stack(config, causal=False), decoder=Stack(config, causal=True, cross=True))

    def encode(self, source: Tensor, lengths: Tensor | None = None, *, documents: Documents | None = None) -> Memory:
        """Source ids (B, S), read both ways."""
        return Memory(self.encoder(source, lengths, documents=documents), lengths, documents)

    def decode(
        self,
        target: Tensor,
        memory: Memory | None,
        lengths: Tensor | None = None,
        *,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Target ids (B, T) to hidden states (B, T, D), looking at the source.

        With a cache, the source is needed at the first step only; later steps may give None.
        """
        hidden = None if memory is None else memory.hidden
        mask = self._source_mask(target, memory, documents, cache)
        return self.decoder(target, lengths, documents=documents, memory=hidden, memory_mask=mask, cache=cache)

    def _source_mask(
        self, target: Tensor, memory: Memory | None, documents: Documents | None, cache: Cache | None
    ) -> Mask:
        """Which positions of the source are real, from the memory or, once it has been seen, from the cache."""
        if cache is not None and cache.source is not None:
            if memory is not None and memory is not cache.source:
                raise ValueError("this cache belongs to another source; make a new cache for a new source")
            return Mask(lengths=cache.source_lengths)
        if memory is None:
            raise ValueError("decode needs the encoded source, or a cache that has already seen it")
        if (documents is None) != (memory.documents is None):
            raise ValueError("pack source and target both, or neither")
        if documents is not None and memory.documents is not None:
            if len(documents.lengths) != len(memory.documents.lengths):
                raise ValueError(
                    f"{len(memory.documents.lengths)} source documents, but {len(documents.lengths)} of the target"
                )
            return Mask(documents=(documents, memory.documents))
        if len(memory.hidden) != len(target):
            raise ValueError(f"{len(memory.hidden)} rows of source, but {len(target)} of target")
        if cache is not None:
            lengths = None if memory.lengths is None else memory.lengths.long().contiguous()
            cache.source, cache.source_lengths = memory, lengths
        return Mask(lengths=memory.lengths)

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
        memory = self.encode(source, source_lengths, documents=source_documents)
        return self.words(self.decode(target, memory, target_lengths, documents=target_documents))


FAMILIES: dict[str, type[Network]] = {"encoder-decoder": EncoderDecoder, "encoder": Encoder, "decoder": Decoder}


def build(config: ModelConfig, device: torch.device | str | None = None) -> Network:
    """The network that a config describes, with fresh weights; on the device `meta` it has shapes and no numbers."""
    with torch.device(device or torch.get_default_device()):
        network = FAMILIES[config.family](config)
    if torch.device(device or torch.get_default_device()).type != "meta":
        initialise(network, config)
    return network
