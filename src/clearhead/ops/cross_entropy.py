"""Cross entropy of a large vocabulary in pieces, so that its scores are never in memory all at once.

N rows · D width · V words
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORED = -100  # the label of positions without a loss


class Chunk(NamedTuple):
    """Of some rows what their losses are made of, and the gradient of their total."""

    # (4, N) of each row's scores: the log of the sum of their powers, the answer's, the best; with smoothing, the mean
    rows: Tensor
    scores: Tensor  # (N, V) the gradient by the scores


def cross_entropy_chunk(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float) -> Chunk:
    """`cross_entropy` of x Wᵀ + b and its gradient, written out: softmax minus the answer; compiled, few passes.

    x (N, D), weight (V, D), labels (N,).
    """
    scores = to_fp32(F.linear(x, weight, bias))  # (N, V)
    classes, answers = scores.shape[-1], labels.clamp(min=0)[:, None]
    spread = torch_smoothing(smoothing, classes)
    best = scores.amax(dim=1, keepdim=True)
    log_sum = best + (scores - best).exp().sum(dim=1, keepdim=True).log()
    rows = torch.cat([log_sum, scores.gather(1, answers), best, scores.mean(dim=1, keepdim=True)], 1)
    here = torch.arange(classes, device=x.device) == answers
    grad = (scores - log_sum).exp() - spread / classes - (1 - spread) * here.to(scores)
    return Chunk(rows.T, grad.masked_fill((labels == IGNORED)[:, None], 0).to(x.dtype))


def torch_smoothing(smoothing: float, classes: int) -> float:
    """Our smoothing ε as torch has it: it shares it out to all classes, the right one among them."""
    return smoothing * classes / max(1, classes - 1)


def from_rows(labels: Tensor, rows: Tensor, spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Total, count, plain and right from four numbers of each row's scores, (4, N), summed in float64.

    A score that ties with the best counts as right.
    """
    counts = labels != IGNORED
    log_sum, answered, best, mean = rows.double().masked_fill(~counts, 0)
    plain = (log_sum - answered).sum()
    total = plain + spread * (answered - mean).sum() if spread else plain
    return total, counts.sum(), plain, ((answered == best) & counts).sum()


class ChunkedCrossEntropy(torch.autograd.Function):
    """`cross_entropy` of x Wᵀ + b for some rows at a time: gradients are made at once and the scores dropped."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        rows: int,
        work: Callable[..., Chunk],
    ) -> tuple[Tensor, ...]:
        # Autocast would cast the matrix anew for every piece; what is added up over the pieces stays in fp32.
        dtype = matmul_dtype(x)
        inputs, matrix, offset = (None if t is None else t.detach().to(dtype) for t in (x, weight, bias))
        assert inputs is not None
        assert matrix is not None
        seen: list[Tensor] = []
        grads: list[Tensor | None] = [torch.empty_like(x), None, None]
        for at in range(0, len(x), rows):
            here = slice(at, at + rows)
            found = work(inputs[here], matrix, offset, labels[here], smoothing)
            _product(found.scores, matrix, grads[0][here])  # type: ignore[index]
            grads[1] = _add_matmul(grads[1], found.scores.T, inputs[here])
            if bias is not None:
                more = found.scores.sum(0, dtype=accumulation_dtype(found.scores))
                grads[2] = more if grads[2] is None else grads[2].add_(more)
            seen.append(found.rows)
            del found  # its scores go before the next ones come
        ctx.save_for_backward(*grads)
        total, count, plain, right = from_rows(labels, torch.cat(seen, 1), torch_smoothing(smoothing, len(weight)))
        kind = accumulation_dtype(x)
        rest = count, plain.to(kind, copy=True), right
        ctx.mark_non_differentiable(*rest)
        return total.to(kind), *rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        def scaled(found: Tensor | None) -> Tensor | None:  # on a GPU a list is scaled faster than found * grad
            return None if found is None else torch._foreach_mul([found], grad.to(found.dtype))[0]

        return *map(scaled, ctx.saved_tensors), None, None, None, None


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, which may be narrower."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _add_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b in fp32 or wider, for a and b that may be narrower; a GPU has no narrow product in between."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    product = a @ b
    return to_fp32(product) if total is None else total.add_(product)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer computes in: autocast's dtype where that is on and applies."""
    casts = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if casts else x.dtype


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """What to add up in: fp32, or float64 for x that is."""
    return torch.promote_types(x.dtype, torch.float32)


def to_fp32(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x))
