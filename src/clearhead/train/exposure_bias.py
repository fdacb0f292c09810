"""Exposure bias: accuracy lost, position by position, when a translator is fed its own predictions.

B batch · S source tokens · T target tokens
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
    """Per position (T,): the number of rows with a token there, and the correct predictions in both modes."""

    count: Tensor
    teacher_forced: Tensor  # correct when fed the target
    free_running: Tensor  # correct when fed its own predictions

    @property
    def bias(self) -> Tensor:
        """Accuracy with teacher forcing minus free-running at each position, 0 where no row has a token: (T,)."""
        return (self.teacher_forced - self.free_running) / self.count.clamp(min=1)

    @property
    def mean(self) -> Tensor:
        """Accuracy with teacher forcing minus free-running over all tokens, a scalar."""
        return (self.teacher_forced - self.free_running).sum() / self.count.sum().clamp(min=1)

    def __add__(self, other: ExposureBias) -> ExposureBias:
        """The counts of two batches, added."""
        length = max(len(self.count), len(other.count))

        def add(a: Tensor, b: Tensor) -> Tensor:
            return F.pad(a, (0, length - len(a))) + F.pad(b, (0, length - len(b)))

        return ExposureBias(
            add(self.count, other.count),
            add(self.teacher_forced, other.teacher_forced),
            add(self.free_running, other.free_running),
        )


def exposure_bias(
    network: EncoderDecoder, source: Tensor, source_lengths: Tensor, target: Tensor, target_lengths: Tensor, eos_id: int
) -> ExposureBias:
    """Compare teacher forcing with greedy decoding from the first target token, without dropout.

    source (B, S); target (B, T + 1) with its begin token and `eos_id`, both counted in its lengths. A free-running
    token is correct if it equals the target token at its position and comes before the end of its row.
    """
    inputs, labels = target[:, :-1], target[:, 1:]  # (B, T) each
    mask = torch.arange(labels.shape[1], device=target.device) < target_lengths[:, None] - 1
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            encoder_output = network.encode(source, source_lengths)
            assert network.heads.lm_head is not None
            hidden = network.decode(inputs, encoder_output, target_lengths - 1)
            teacher_forced = argmax_tokens(hidden, network.heads.lm_head)
            free_running, ended = _decode_greedily(network, encoder_output, inputs, eos_id)
    finally:
        network.train(was_training)
    correct = (mask & (teacher_forced == labels), mask & (free_running == labels) & ~ended)
    return ExposureBias(mask.sum(0), correct[0].sum(0), correct[1].sum(0))


def _decode_greedily(
    network: EncoderDecoder, encoder_output: EncoderOutput, inputs: Tensor, eos_id: int
) -> tuple[Tensor, Tensor]:
    """Return greedy tokens after the first of inputs (B, T), and whether each comes after `eos_id`: (B, T) both."""
    cache = KVCache(network.config, rows=len(inputs), capacity=inputs.shape[1])
    token, tokens = inputs[:, :1], []
    for step in range(inputs.shape[1]):
        hidden = network.decode(token, None if step else encoder_output, cache=cache)
        token = network.logits(hidden).argmax(-1)  # (B, 1)
        tokens.append(token)
    decoded = torch.cat(tokens, dim=1)
    eos_seen = (decoded == eos_id).cumsum(1)
    return decoded, F.pad(eos_seen[:, :-1], (1, 0)) > 0
