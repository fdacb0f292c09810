"""The cross entropy of large batches on a GPU: each row of scores is read once from memory and becomes its gradient.

N rows · D width · V words
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.cross_entropy import IGNORED, Chunk, torch_smoothing

try:
    import triton
    from triton import language as tl
except ImportError:  # there is none for this platform; `piece` does the same
    triton = None

BLOCK, WARPS = 8192, 16  # words of a row that a program looks at together, as an H200 likes it


def kernel_supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine can use it."""
    return triton is not None and device.type == "cuda" and dtype != torch.float64


def triton_cross_entropy_chunk(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
) -> Chunk:
    """As `piece`: what cross entropy is made of, and its gradient; x (N, D), weight (V, D), labels (N,)."""
    scores = F.linear(x, weight, bias)  # (N, V)
    words, rows = scores.shape[-1], torch.empty(4, len(x), device=x.device)
    spread = torch_smoothing(smoothing, words)
    _to_gradient[(len(x),)](scores, labels, *rows, words, spread, IGNORED, smoothing > 0, BLOCK, num_warps=WARPS)
    return Chunk(rows, scores)


if triton is not None:
    LOG2 = tl.constexpr(1.4426950408889634)  # of e: a GPU has powers of two

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
        """A program for each row: one pass for its log sum, answer, best and mean, one to write softmax − answer.

        Arithmetic takes as long as memory here: whole blocks go without a mask, and the answer is put in at the end.
        """
        row = tl.program_id(0)
        at = scores + row.to(tl.int64) * words
        label = tl.load(labels + row)
        counts = label != ignored
        answer = tl.load(at + tl.where(counts, label, 0)).to(tl.float32)
        best, total, together = -float("inf"), 0.0, 0.0
        whole, inside = words // block * block, tl.arange(0, block)
        for first in range(0, whole, block):
            x = tl.load(at + first + inside, eviction_policy="evict_last").to(tl.float32)  # for the second pass
            best, total = _seen(x, best, total)
            if smooth:  # only then is the mean asked for
                together += tl.sum(x, 0)
        if whole < words:
            there = whole + inside < words
            x = tl.load(at + whole + inside, mask=there, other=-float("inf")).to(tl.float32)
            best, total = _seen(x, best, total)
            if smooth:
                together += tl.sum(tl.where(there, x, 0.0), 0)
        log_sum = best + tl.log(total)
        tl.store(log_sums + row, log_sum)
        tl.store(answers + row, answer)
        tl.store(bests + row, best)
        tl.store(means + row, together / words)
        share, base = spread / words, log_sum * LOG2
        if counts:
            for first in range(0, whole, block):
                x = tl.load(at + first + inside, eviction_policy="evict_first").to(tl.float32)
                x = tl.exp2(x * LOG2 - base)
                if smooth:
                    x -= share
                tl.store(at + first + inside, x.to(scores.dtype.element_ty), eviction_policy="evict_first")
            if whole < words:
                there = whole + inside < words
                x = tl.load(at + whole + inside, mask=there, other=-float("inf")).to(tl.float32)
                x = tl.exp2(x * LOG2 - base) - share
                tl.store(at + whole + inside, x.to(scores.dtype.element_ty), mask=there)
            tl.debug_barrier()  # all of the row is written
            x = tl.exp2(answer * LOG2 - base) - share - (1.0 - spread)
            tl.store(at + label, x.to(scores.dtype.element_ty))
        else:
            for first in range(0, words, block):
                nothing = tl.zeros((block,), scores.dtype.element_ty)
                tl.store(at + first + inside, nothing, mask=first + inside < words)

    @triton.jit
    def _seen(x, best, total):
        """The best and the sum of powers so far, of which the best is one."""
        higher = tl.maximum(best, tl.max(x, 0))
        return higher, total * tl.exp2((best - higher) * LOG2) + tl.sum(tl.exp2(x * LOG2 - higher * LOG2), 0)
