"""Prefill and decode steps of a network with a contiguous KV cache: greedy search and sampling on a GPU.

B batch · P prompt tokens · T new tokens · D model dim · V vocabulary

A decode step reads no tables here, which CUDA graphs replay fastest; everything else runs on step runners.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.inference.batches import raise_if_cancelled
from clearhead.inference.request import TokenIds
from clearhead.model import Decoder, EncoderDecoder, KVCache

GenerativeNetwork = Decoder | EncoderDecoder
PREFILL_CHUNK = 512  # prompt tokens of a prefill chunk, where all prompts have the same length


class ModelRunner:
    """A network and the KV cache of a batch of B rows."""

    def __init__(self, network: GenerativeNetwork, rows: int, capacity: int):
        if network.training:
            raise ValueError("the network is in training mode, where dropout is on; call network.eval() first")
        self.network, self.config = network, network.config
        self.cache = KVCache(network.config, rows, min(capacity, network.config.max_positions))
        self.device = network.decoder.embedding.tokens.weight.device

    def prefill(self, prompts: Sequence[TokenIds], sources: Sequence[TokenIds] | None = None) -> Tensor:
        """Encode the sources of a translator and prefill the prompts; return the logits (B, V) after each prompt."""
        ids, lengths = pad_batch(prompts, self.device)
        if isinstance(self.network, EncoderDecoder):
            assert sources is not None
            encoder_output = self.network.encode(*pad_batch(sources, self.device))
            hidden = self.network.decode(ids, encoder_output, lengths, cache=self.cache)  # (B, P, D)
        else:
            hidden = self._prefill(ids, lengths)
        last = hidden[:, -1] if lengths is None else hidden[torch.arange(len(hidden), device=self.device), lengths - 1]
        return self._logits(last)

    def _prefill(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """Run prompts (B, P), in chunks if possible to bound memory; return the hidden states of the last chunk."""
        assert isinstance(self.network, Decoder)
        if lengths is not None:
            return self.network.decode(ids, lengths, cache=self.cache)
        *chunks, last = ids.split(PREFILL_CHUNK, dim=1)
        for chunk in chunks:
            self.network.decode(chunk, cache=self.cache)
        return self.network.decode(last, cache=self.cache)

    def decode_step(self, ids: Tensor) -> Tensor:
        """Run a decode step on ids (B, T); return logits (B, T, V)."""
        raise_if_cancelled()
        if isinstance(self.network, EncoderDecoder):
            return self._logits(self.network.decode(ids, None, cache=self.cache))
        return self._logits(self.network.decode(ids, cache=self.cache))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.network.logits(hidden)
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows: row n becomes the old row rows[n]."""
        self.cache.select(rows, tighten=self.device.type == "cpu")

    def rewind(self, lengths: Sequence[int]) -> None:
        """Shorten each row of the KV cache to a number of tokens, prompt included."""
        self.cache.rewind(lengths)


def pad_batch(rows: Sequence[TokenIds], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return rows of ids as one tensor (B, T), and their lengths (B,) or None if all are equal."""
    lengths = [len(row) for row in rows]
    max_length = max(lengths)
    ids = torch.tensor([[*row, *[0] * (max_length - len(row))] for row in rows]).to(device, non_blocking=True)
    return ids, None if min(lengths) == max_length else torch.tensor(lengths).to(device, non_blocking=True)
