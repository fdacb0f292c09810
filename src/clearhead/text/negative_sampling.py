"""Gradients of skip-gram and CBOW with negative sampling, as batched matmuls over blocks of words.

The text is split into blocks of B words. A block with W words on each side forms C = B + 2W columns of a small matrix
whose band holds every (word, context) pair; the words of a block share N random negatives. One matmul scores all pairs,
and each vector is read and written once per block instead of once per pair.
n blocks · B words per block · W window · C = B + 2W columns · N shared negatives · D dim
"""

import torch
from torch import Tensor


def context_masks(block: int, window: int) -> Tensor:
    """Context masks (B, W + 1, W + 1, C) by word, left and right window size."""
    offset = torch.arange(block + 2 * window) - torch.arange(window, window + block)[:, None, None, None]
    size = torch.arange(window + 1)
    return ((offset >= -size[:, None, None]) & (offset <= size[:, None]) & (offset != 0)).float()


def skip_gram(u: Tensor, x: Tensor, weight: Tensor, shared: int) -> tuple[Tensor, Tensor]:
    """Gradients of the skip-gram loss with respect to u and x: each word predicts its context.

    u (n, B, D) input vectors of the words; x (n, C + N, D) output vectors of columns and negatives; weight
    (n, B, C + N) weight of each pair, and of each of the N = `shared` negatives.
    """
    error = torch.bmm(u, x.mT).sigmoid_()  # (n, B, C + N)
    error[..., :-shared] -= 1
    error *= weight
    return torch.bmm(error, x), torch.bmm(error.mT, u)


def cbow(c: Tensor, x: Tensor, mean: Tensor, negative_weight: float) -> tuple[Tensor, Tensor]:
    """Gradients of the CBOW loss with respect to c and x: the mean of the context predicts the word.

    c (n, C, D) input vectors of the columns; x (n, B + N, D) output vectors of words and negatives, each negative
    weighted by `negative_weight`; mean (n, B, C) averages a word's context. A word without context has no gradient.
    """
    h = torch.bmm(mean, c)  # (n, B, D)
    words, negatives = x[:, : h.shape[1]], x[:, h.shape[1] :]
    positive_error = (h * words).sum(-1, keepdim=True).sigmoid_().sub_(1)  # (n, B, 1)
    negative_error = torch.bmm(h, negatives.mT).sigmoid_().mul_(negative_weight)  # (n, B, N)
    dh = torch.baddbmm(positive_error * words, negative_error, negatives)
    return torch.bmm(mean.mT, dh), torch.cat([positive_error * h, torch.bmm(negative_error.mT, h)], dim=1)
