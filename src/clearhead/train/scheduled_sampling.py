"""Scheduled sampling (Bengio et al. 2015): more and more often, the decoder reads what it would have written itself.

Two passes (Mihaylova & Martins 2019): the first predicts every word from the true ones, without gradient; the second,
which learns, reads a mixture of both.   B rows · S source tokens · T target tokens
"""

import math
from typing import Literal

import torch
from torch import Tensor

from clearhead.model import Documents, EncoderDecoder
from clearhead.train.losses import argmax_tokens

Decay = Literal["linear", "exponential", "inverse-sigmoid"]


def probability(decay: Decay, step: int, pace: float, floor: float = 0.0) -> float:
    """How likely an input is replaced at a step: 1 minus the share of true words, which decays to `floor`.

    linear            1 − step / pace
    exponential       e^(−step / pace), the article's k^step with k = e^(−1/pace)
    inverse-sigmoid   pace / (pace + e^(step / pace))
    """
    match decay:
        case "linear":
            true = 1 - step / pace
        case "exponential":
            true = math.exp(-step / pace)
        case "inverse-sigmoid":
            true = 1 / (1 + math.exp(min(step / pace - math.log(pace), 700)))  # a float ends at e^709
    return 1 - max(true, floor)


def scheduled_inputs(
    network: EncoderDecoder,
    source: Tensor,
    target: Tensor,
    source_lengths: Tensor | None,
    target_lengths: Tensor | None,
    probability: float,
    generator: torch.Generator,
    *,
    source_documents: Documents | None = None,
    target_documents: Documents | None = None,
) -> Tensor:
    """The decoder's inputs (B, T) with some replaced by what the network predicted from those before.

    The network is taken as it is, with dropout when it trains. Neither what begins a row or document nor padding is
    ever replaced. `generator` alone decides which are; on the GPU's own generator nothing waits.
    """
    with torch.no_grad():
        encoder_output = network.encode(source, source_lengths, documents=source_documents)
        hidden = network.decode(target, encoder_output, target_lengths, documents=target_documents)
        assert network.heads.lm_head is not None
        predicted = argmax_tokens(hidden, network.heads.lm_head).roll(1, dims=1)  # at t, the prediction made at t − 1
    drawn = torch.rand(target.shape, generator=generator, device=generator.device) < probability
    positions = torch.arange(target.shape[1], device=target.device)
    replaced = drawn.to(target.device) & ((positions if target_documents is None else target_documents.positions) > 0)
    if target_lengths is not None:
        replaced = replaced & (positions < target_lengths[:, None])
    return torch.where(replaced, predicted, target)
