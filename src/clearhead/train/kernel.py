"""The cross entropy of large batches on a GPU: each row of scores is read once from memory and becomes its gradient.

N rows · D width · V words
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.data import IGNORED
from clearhead.train.pieces import Piece, from_rows

try:
    import triton
    from triton import language as tl
except ImportError:  # there is none for this platform; `piece` does the same
    triton = None

BLOCK, WARPS = 4096, 8  # words of a row that a program looks at together, as an H200 likes it


def kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine can use it."""
    return triton is not None and device.type == "cuda" and dtype != torch.float64


def kernel_piece(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float) -> Piece:
    """As `piece`: the sums of cross entropy and its gradient, x (N, D), weight (V, D), labels (N,)."""
    scores = F.linear(x, weight, bias)  # (N, V)
    words = scores.shape[-1]
    spread = smoothing * words / max(1, words - 1)
    log_sum, answered, best, mean = found = torch.empty(4, len(x), device=x.device)
    _to_gradient[(len(x),)](scores, labels, *found, words, spread, IGNORED, smoothing > 0, BLOCK, num_warps=WARPS)
    sums = from_rows(labels, log_sum, answered, best, mean, spread)
    return Piece(*sums, scores)


if triton is not None:

    @triton.jit
    def _to_gradient(
        scores,
        labels,
        log_sums,
        answers,
        bests,
        means,
        words,
        spread,
        ignored: tl.constexpr,
        smooth: tl.constexpr,
        block: tl.constexpr,
    ):
        """A program for each row: one pass for its log sum, answer, best and mean, one to write softmax − answer."""
        row = tl.program_id(0)
        at = scores + row.to(tl.int64) * words
        label = tl.load(labels + row)
        best, total, together = -float("inf"), 0.0, 0.0
        for first in range(0, words, block):
            columns = first + tl.arange(0, block)
            x = tl.load(at + columns, mask=columns < words, other=-float("inf"), eviction_policy="evict_last")
            x = x.to(tl.float32)  # and stays in the cache for the second pass, if it can
            higher = tl.maximum(best, tl.max(x, 0))
            total = total * tl.exp(best - higher) + tl.sum(tl.exp(x - higher), 0)
            best = higher
            if smooth:  # only then is the mean asked for
                together += tl.sum(tl.where(columns < words, x, 0.0), 0)
        log_sum = best + tl.log(total)
        counts = label != ignored
        tl.store(log_sums + row, log_sum)
        tl.store(answers + row, tl.load(at + tl.where(counts, label, 0)).to(tl.float32))
        tl.store(bests + row, best)
        tl.store(means + row, together / words)
        for first in range(0, words, block):
            columns = first + tl.arange(0, block)
            x = tl.load(at + columns, mask=columns < words, other=-float("inf"), eviction_policy="evict_first")
            x = tl.exp(x.to(tl.float32) - log_sum) - spread / words - tl.where(columns == label, 1.0 - spread, 0.0)
            x = tl.where(counts, x, 0.0).to(scores.dtype.element_ty)
            tl.store(at + columns, x, mask=columns < words, eviction_policy="evict_first")
