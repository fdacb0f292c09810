"""Triton cross-entropy: reads each row of logits once from memory and overwrites it with its gradient.

N rows · D model dim · V vocabulary
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.cross_entropy import IGNORED, CrossEntropyChunk, torch_label_smoothing

try:
    import triton
    from triton import language as tl
except ImportError:  # no Triton on this platform; `cross_entropy_chunk` does the same
    triton = None

BLOCK, WARPS = 8192, 16  # logits of a row that a program processes at a time, tuned on an H200


def triton_cross_entropy_supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs here: CUDA with Triton, and not float64."""
    return triton is not None and device.type == "cuda" and dtype != torch.float64


def triton_cross_entropy_chunk(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, label_smoothing: float
) -> CrossEntropyChunk:
    """Like `cross_entropy_chunk`: loss statistics and gradient for x (N, D), weight (V, D), labels (N,)."""
    logits = F.linear(x, weight, bias)  # (N, V)
    vocab_size, stats = logits.shape[-1], torch.empty(4, len(x), device=x.device)
    eps = torch_label_smoothing(label_smoothing, vocab_size)
    _cross_entropy[(len(x),)](
        logits, labels, *stats, vocab_size, eps, IGNORED, label_smoothing > 0, BLOCK, num_warps=WARPS
    )
    return CrossEntropyChunk(stats, logits)


if triton is not None:
    LOG2E = tl.constexpr(1.4426950408889634)  # GPUs compute exp2

    @triton.jit
    def _cross_entropy(
        logits,
        labels,
        logsumexps,
        label_logits,
        max_logits,
        mean_logits,
        vocab_size,
        eps,
        ignored: tl.constexpr,
        smooth: tl.constexpr,
        block: tl.constexpr,
    ):
        """One program per row: a pass for the statistics, then one that writes softmax minus the smoothed label.

        Compute takes as long as memory here, so full blocks are not masked and the label is subtracted at the end.
        """
        row = tl.program_id(0)
        at = logits + row.to(tl.int64) * vocab_size
        label = tl.load(labels + row)
        valid = label != ignored
        label_logit = tl.load(at + tl.where(valid, label, 0)).to(tl.float32)
        max_logit, sum_exp, sum_logits = -float("inf"), 0.0, 0.0
        full, offsets = vocab_size // block * block, tl.arange(0, block)
        for first in range(0, full, block):
            x = tl.load(at + first + offsets, eviction_policy="evict_last").to(tl.float32)  # for the second pass
            max_logit, sum_exp = _online_softmax(x, max_logit, sum_exp)
            if smooth:  # the mean is only used with label smoothing
                sum_logits += tl.sum(x, 0)
        if full < vocab_size:
            mask = full + offsets < vocab_size
            x = tl.load(at + full + offsets, mask=mask, other=-float("inf")).to(tl.float32)
            max_logit, sum_exp = _online_softmax(x, max_logit, sum_exp)
            if smooth:
                sum_logits += tl.sum(tl.where(mask, x, 0.0), 0)
        logsumexp = max_logit + tl.log(sum_exp)
        tl.store(logsumexps + row, logsumexp)
        tl.store(label_logits + row, label_logit)
        tl.store(max_logits + row, max_logit)
        tl.store(mean_logits + row, sum_logits / vocab_size)
        eps_each, base = eps / vocab_size, logsumexp * LOG2E
        if valid:
            for first in range(0, full, block):
                x = tl.load(at + first + offsets, eviction_policy="evict_first").to(tl.float32)
                x = tl.exp2(x * LOG2E - base)
                if smooth:
                    x -= eps_each
                tl.store(at + first + offsets, x.to(logits.dtype.element_ty), eviction_policy="evict_first")
            if full < vocab_size:
                mask = full + offsets < vocab_size
                x = tl.load(at + full + offsets, mask=mask, other=-float("inf")).to(tl.float32)
                x = tl.exp2(x * LOG2E - base) - eps_each
                tl.store(at + full + offsets, x.to(logits.dtype.element_ty), mask=mask)
            tl.debug_barrier()  # the whole row is written
            x = tl.exp2(label_logit * LOG2E - base) - eps_each - (1.0 - eps)
            tl.store(at + label, x.to(logits.dtype.element_ty))
        else:
            for first in range(0, vocab_size, block):
                zeros = tl.zeros((block,), logits.dtype.element_ty)
                tl.store(at + first + offsets, zeros, mask=first + offsets < vocab_size)

    @triton.jit
    def _online_softmax(x, max_logit, sum_exp):
        """Update the running maximum and sum of exponentials with a block of logits."""
        new_max = tl.maximum(max_logit, tl.max(x, 0))
        return new_max, sum_exp * tl.exp2((max_logit - new_max) * LOG2E) + tl.sum(
            tl.exp2(x * LOG2E - new_max * LOG2E), 0
        )
