"""The arithmetic of word2vec: skip-gram and CBOW with negative sampling as batched matrix products.

A stretch of text is cut into blocks of B words. A block and the words around it, W to each side, are the C = B + 2W
columns of a small matrix whose band holds every pair of the block; N random words that the block shares stand for the
negatives. One product scores them all, and a word is fetched and changed once a block instead of once a pair.
n blocks · B words of a block · C = B + 2W columns · N shared negatives · D width
"""

import torch
from torch import Tensor


def context(block: int, window: int) -> Tensor:
    """Which columns a word sees: (B, W + 1, W + 1, C), 1 for the `left` columns before it and the `right` behind it."""
    offset = torch.arange(block + 2 * window) - torch.arange(window, window + block)[:, None, None, None]
    reach = torch.arange(window + 1)
    return ((offset >= -reach[:, None, None]) & (offset <= reach[:, None]) & (offset != 0)).float()


def skip_gram(u: Tensor, x: Tensor, weight: Tensor, shared: int) -> tuple[Tensor, Tensor]:
    """Gradients of the skip-gram loss: each word of a block predicts the columns around it.

    u (n, B, D) input vectors of the words; x (n, C + N, D) output vectors of columns and negatives; weight
    (n, B, C + N) how often word and column are a pair, and how much each of the N `shared` negatives counts.
    """
    error = torch.bmm(u, x.mT).sigmoid_()  # (n, B, C + N)
    error[..., :-shared] -= 1
    error *= weight
    return torch.bmm(error, x), torch.bmm(error.mT, u)


def cbow(c: Tensor, x: Tensor, mean: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Gradients of the CBOW loss: the mean of the columns around a word predicts the word.

    c (n, C, D) input vectors of the columns; x (n, B + N, D) output vectors of the words and of the negatives, each of
    which counts `share`; mean (n, B, C) takes the mean of a word's context. A word that sees nothing changes nothing.
    """
    h = torch.bmm(mean, c)  # (n, B, D)
    words, noise = x[:, : h.shape[1]], x[:, h.shape[1] :]
    near = (h * words).sum(-1, keepdim=True).sigmoid_().sub_(1)  # (n, B, 1)
    far = torch.bmm(h, noise.mT).sigmoid_().mul_(share)  # (n, B, N)
    dh = torch.baddbmm(near * words, far, noise)
    return torch.bmm(mean.mT, dh), torch.cat([near * h, torch.bmm(far.mT, h)], dim=1)
