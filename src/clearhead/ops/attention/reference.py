"""The reference: scaled dot-product attention, written out.   B batch · H heads · T queries · S keys · E head dim"""

import math

from torch import Tensor
from torch.nn import functional as F


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / √E) v, with the weights (section 3.2.1).

    q (B, H, T, E); k and v (B, H, S, E); `allowed` broadcasts to (B, H, T, S), True where a query may look.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
        blind = ~mask.any(dim=-1, keepdim=True)  # a row with nothing to see attends to nothing;
        scores = scores.masked_fill(blind, 0)  # a NaN that came in elsewhere still shows
    weights = scores.softmax(dim=-1)
    if mask is not None:
        weights = weights.masked_fill(blind, 0)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights @ v, weights
