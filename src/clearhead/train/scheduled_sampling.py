"""Scheduled sampling (Bengio et al. 2015): the decoder is increasingly fed its own predictions during training.

Two passes (Mihaylova & Martins 2019): the first predicts every token with teacher forcing, without gradient; the second
trains on a mixture of targets and predictions.   B batch · S source tokens · T target tokens
"""

import math
from typing import Literal

import torch
from torch import Tensor

from clearhead.model import Documents, EncoderDecoder
from clearhead.train.losses import argmax_tokens

Decay = Literal["linear", "exponential", "inverse-sigmoid"]


def sampling_prob(decay: Decay, step: int, decay_steps: float, min_prob: float = 0.0) -> float:
    """Return the probability of replacing an input at a step: 1 minus the teacher forcing ratio.

    The teacher forcing ratio decays to `min_prob`; with k = decay_steps:

    linear            1 − step / k
    exponential       e^(−step / k), the article's c^step with c = e^(−1/k)
    inverse-sigmoid   k / (k + e^(step / k))
    """
    match decay:
        case "linear":
            teacher_forcing = 1 - step / decay_steps
        case "exponential":
            teacher_forcing = math.exp(-step / decay_steps)
        case "inverse-sigmoid":  # exp overflows a float above 709
            teacher_forcing = 1 / (1 + math.exp(min(step / decay_steps - math.log(decay_steps), 700)))
    return 1 - max(teacher_forcing, min_prob)


def scheduled_inputs(
    network: EncoderDecoder,
    source: Tensor,
    target: Tensor,
    source_lengths: Tensor | None,
    target_lengths: Tensor | None,
    prob: float,
    generator: torch.Generator,
    *,
    source_documents: Documents | None = None,
    target_documents: Documents | None = None,
) -> Tensor:
    """Return the decoder inputs (B, T), each token replaced with probability `prob` by the network's prediction.

    The network keeps its mode: dropout is active in training. The first token of a row or document and padding are
    never replaced. Which tokens are replaced depends on `generator` only.
    """
    with torch.no_grad():
        encoder_output = network.encode(source, source_lengths, documents=source_documents)
        hidden = network.decode(target, encoder_output, target_lengths, documents=target_documents)
        assert network.heads.lm_head is not None
        predicted = argmax_tokens(hidden, network.heads.lm_head).roll(1, dims=1)  # predicted[t] was made at t − 1
    drawn = torch.rand(target.shape, generator=generator, device=generator.device) < prob
    positions = torch.arange(target.shape[1], device=target.device)
    replaced = drawn.to(target.device) & ((positions if target_documents is None else target_documents.positions) > 0)
    if target_lengths is not None:
        replaced = replaced & (positions < target_lengths[:, None])
    return torch.where(replaced, predicted, target)
