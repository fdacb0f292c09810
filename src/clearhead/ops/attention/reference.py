"""The reference: scaled dot-product attention, written out.   B batch · H heads · T queries · S keys · E head dim"""

import math

from torch import Tensor
from torch.nn import functional as F


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return softmax(q kᵀ / √E) v and the attention weights (section 3.2.1).

    q (B, H, T, E); k and v (B, H, S, E); `mask` broadcasts to (B, H, T, S), True where attention is allowed.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
        fully_masked = ~mask.any(dim=-1, keepdim=True)  # softmax of -inf everywhere would be NaN:
        scores = scores.masked_fill(fully_masked, 0)  # such a query gets zeros, while a NaN in q, k or v propagates
    weights = scores.softmax(dim=-1)
    if mask is not None:
        weights = weights.masked_fill(fully_masked, 0)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights @ v, weights
