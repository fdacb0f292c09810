"""Exposure bias: how much a translator loses, position by position, when it reads its own words instead of true ones.

B rows · S source tokens · T target tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.model import EncoderDecoder, EncoderOutput, KVCache
from clearhead.train.losses import argmax_tokens


@dataclass(frozen=True)
class ExposureBias:
    """At each position (T,): how many rows have a word there, and how many were right, read either way."""

    count: Tensor
    forced: Tensor  # having read the true words before
    free: Tensor  # having read its own

    @property
    def bias(self) -> Tensor:
        """Accuracy forced minus free at each position, 0 where no row reaches: (T,)."""
        return (self.forced - self.free) / self.count.clamp(min=1)

    @property
    def mean(self) -> Tensor:
        """Accuracy forced minus free over all words, a scalar."""
        return (self.forced - self.free).sum() / self.count.sum().clamp(min=1)

    def __add__(self, other: ExposureBias) -> ExposureBias:
        """What two batches show together."""
        max_length = max(len(self.count), len(other.count))

        def both(a: Tensor, b: Tensor) -> Tensor:
            return F.pad(a, (0, max_length - len(a))) + F.pad(b, (0, max_length - len(b)))

        return ExposureBias(both(self.count, other.count), both(self.forced, other.forced), both(self.free, other.free))


def exposure_bias(
    network: EncoderDecoder, source: Tensor, source_lengths: Tensor, target: Tensor, target_lengths: Tensor, end: int
) -> ExposureBias:
    """Compare reading the true target with writing greedily from its first token, without dropout.

    source (B, S); target (B, T + 1) begins with the token that opens a row, closes with `end`, and its lengths count
    both. A free word is right where it equals the true word at its position; a row that has ended has no more words.
    """
    inputs, true = target[:, :-1], target[:, 1:]  # (B, T) each
    counts = torch.arange(true.shape[1], device=target.device) < target_lengths[:, None] - 1
    trains = network.training
    network.eval()
    try:
        with torch.no_grad():
            encoder_output = network.encode(source, source_lengths)
            assert network.heads.lm_head is not None
            forced = argmax_tokens(network.decode(inputs, encoder_output, target_lengths - 1), network.heads.lm_head)
            free, ended = _free(network, encoder_output, inputs, end)
    finally:
        network.train(trains)
    right = (counts & (forced == true), counts & (free == true) & ~ended)
    return ExposureBias(counts.sum(0), right[0].sum(0), right[1].sum(0))


def _free(network: EncoderDecoder, encoder_output: EncoderOutput, inputs: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Greedy words after the first of inputs (B, T), and whether each comes after an `end`: (B, T) both."""
    cache = KVCache(network.config, rows=len(inputs), capacity=inputs.shape[1])
    word, words = inputs[:, :1], []
    for step in range(inputs.shape[1]):
        word = network.logits(network.decode(word, None if step else encoder_output, cache=cache)).argmax(-1)  # (B, 1)
        words.append(word)
    written = torch.cat(words, dim=1)
    ends = (written == end).cumsum(1)
    return written, F.pad(ends[:, :-1], (1, 0)) > 0
