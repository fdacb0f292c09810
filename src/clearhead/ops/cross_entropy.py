"""Chunked cross-entropy for large vocabularies: the full logits are never in memory at once.

N rows · D model dim · V vocabulary
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORED = -100  # label of positions without a loss


class CrossEntropyChunk(NamedTuple):
    """Loss statistics of some rows, and the gradient of their total loss."""

    # (4, N): logsumexp of each row's logits, the label's logit, the largest, and (with label smoothing) the mean
    stats: Tensor
    logits_grad: Tensor  # (N, V) gradient with respect to the logits


def cross_entropy_chunk(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, label_smoothing: float
) -> CrossEntropyChunk:
    """Cross-entropy of x Wᵀ + b and its gradient, softmax minus the smoothed label, in few passes once compiled.

    x (N, D), weight (V, D), labels (N,).
    """
    logits = to_fp32(F.linear(x, weight, bias))  # (N, V)
    vocab_size, targets = logits.shape[-1], labels.clamp(min=0)[:, None]
    eps = torch_label_smoothing(label_smoothing, vocab_size)
    max_logit = logits.amax(dim=1, keepdim=True)
    logsumexp = max_logit + (logits - max_logit).exp().sum(dim=1, keepdim=True).log()
    stats = torch.cat([logsumexp, logits.gather(1, targets), max_logit, logits.mean(dim=1, keepdim=True)], 1)
    one_hot = torch.arange(vocab_size, device=x.device) == targets
    grad = (logits - logsumexp).exp() - eps / vocab_size - (1 - eps) * one_hot.to(logits)
    return CrossEntropyChunk(stats.T, grad.masked_fill((labels == IGNORED)[:, None], 0).to(x.dtype))


def torch_label_smoothing(label_smoothing: float, classes: int) -> float:
    """Convert our label smoothing ε, spread over the wrong classes, to torch's, spread over all classes."""
    return label_smoothing * classes / max(1, classes - 1)


def _loss_sums(labels: Tensor, stats: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return total loss, count, loss without smoothing, and correct predictions from stats (4, N), summed in float64.

    A logit that ties with the largest counts as correct.
    """
    valid = labels != IGNORED
    logsumexp, label_logit, max_logit, mean_logit = stats.double().masked_fill(~valid, 0)
    unsmoothed = (logsumexp - label_logit).sum()
    total = unsmoothed + eps * (label_logit - mean_logit).sum() if eps else unsmoothed
    return total, valid.sum(), unsmoothed, ((label_logit == max_logit) & valid).sum()


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of x Wᵀ + b, `chunk_size` rows at a time: gradients are computed in forward, logits discarded."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        label_smoothing: float,
        chunk_size: int,
        chunk_fn: Callable[..., CrossEntropyChunk],
    ) -> tuple[Tensor, ...]:
        # Cast once: autocast would cast the weight for every chunk. Sums over chunks stay in fp32.
        dtype = matmul_dtype(x)
        inputs, matrix, offset = (None if t is None else t.detach().to(dtype) for t in (x, weight, bias))
        assert inputs is not None
        assert matrix is not None
        stats: list[Tensor] = []
        grads: list[Tensor | None] = [torch.empty_like(x), None, None]
        for start in range(0, len(x), chunk_size):
            rows = slice(start, start + chunk_size)
            chunk = chunk_fn(inputs[rows], matrix, offset, labels[rows], label_smoothing)
            _matmul_into(chunk.logits_grad, matrix, grads[0][rows])  # type: ignore[index]
            grads[1] = _add_matmul(grads[1], chunk.logits_grad.T, inputs[rows])
            if bias is not None:
                bias_grad = chunk.logits_grad.sum(0, dtype=accumulation_dtype(chunk.logits_grad))
                grads[2] = bias_grad if grads[2] is None else grads[2].add_(bias_grad)
            stats.append(chunk.stats)
            del chunk  # free its logits before the next chunk
        ctx.save_for_backward(*grads)
        eps = torch_label_smoothing(label_smoothing, len(weight))
        total, count, unsmoothed, correct = _loss_sums(labels, torch.cat(stats, 1), eps)
        sum_dtype = accumulation_dtype(x)
        constants = count, unsmoothed.to(sum_dtype, copy=True), correct
        ctx.mark_non_differentiable(*constants)
        return total.to(sum_dtype), *constants

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        def scaled(saved: Tensor | None) -> Tensor | None:  # _foreach_mul is faster than saved * grad on a GPU
            return None if saved is None else torch._foreach_mul([saved], grad.to(saved.dtype))[0]

        return *map(scaled, ctx.saved_tensors), None, None, None, None


def _matmul_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, where out may have a lower precision."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _add_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, accumulated in fp32 or float64; on a GPU without rounding the product to bf16 or fp16 first."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    product = a @ b
    return to_fp32(product) if total is None else total.add_(product)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a linear layer computes in: autocast's where it is on and applies."""
    casts = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if casts else x.dtype


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to accumulate in: float64 for float64, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def to_fp32(x: Tensor) -> Tensor:
    """Convert to fp32; float64 stays float64."""
    return x.to(accumulation_dtype(x))
