"""Attention that learns, in fp32 on a CPU, by plain batched products, where torch's fused kernel is slower.

B rows · H heads · T queries · S keys · E head width

Of short rows the weights are kept for the gradient. With dropout, for which that kernel has no form on a CPU, and whose
formula keeps three tables of (B, H, T, S), a byte a weight is kept and the rest computed again, a few rows at a time;
and a quarter as many random numbers are drawn.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops.masks import Mask

ENOUGH = 1024  # queries in all heads together, from which on a few calls more do not count
FEWEST, MOST = 17, 128  # keys for which two products and a softmax beat the fused kernel,
KEPT = 1 << 22  # if no more weights than these come together
WORTH = 24  # keys from which on computing a softmax twice is cheaper than keeping it, with dropout
WEIGHTS = 1 << 20  # of the rows that are computed at once, with dropout: they stay in the caches
CHANCES = 1 << 16  # a random number of 64 bits decides about four weights


def matmul_refuses(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> str | None:
    """Why attention cannot, or should not, be computed by products; None if it should."""
    if not q.is_cpu or q.dtype != torch.float32:
        return "it is for fp32 on a CPU"
    if torch.is_autocast_enabled("cpu"):
        return "it is not cast"
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

        if dropout or not statically_known_true(q.shape[:3].numel() * k.shape[2] <= KEPT):
            return "it is compiled for one shape, without dropout"
    elif torch._C._are_functorch_transforms_active():
        return "it is not for torch.func"
    if mask.documents is not None or mask.pattern.kind != "full" or mask.start is not None or mask.tree is not None:
        return "it is for rows as they are"
    if q.shape[2] != k.shape[2] if mask.causal else mask.lengths is not None:  # causal: no real query sees padding
        return "some keys are hidden"
    if q.shape[1] != k.shape[1]:
        return "heads share keys"
    # Where something is dropped, always, or what is computed again for the gradient would be dropped otherwise.
    if not dropout and not (q.requires_grad and torch.is_grad_enabled()):
        return "nothing is learned"
    queries, keys = q.shape[:3].numel(), k.shape[2]
    fast = keys >= WORTH if dropout else FEWEST <= keys <= MOST and queries * keys <= KEPT
    return None if fast and queries >= ENOUGH else "torch's kernel is as fast"


def matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    """softmax(q kᵀ / √E) v: q (B, H, T, E), k and v (B, H, S, E) to (B, H, T, E); weights dropped with this chance."""
    if dropout:
        chances = min(CHANCES - 1, round(dropout * CHANCES))
        return _Dropped.apply(q, k, v, mask.causal, chances)  # type: ignore[no-untyped-call]
    return _Short.apply(q, k, v, mask.causal)  # type: ignore[no-untyped-call]


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        ctx.shapes, shape = [x.shape for x in (q, k, v)], q.shape
        q, k, v = (_flat(x) for x in (q, k, v))
        weights = _weights(q, k, causal)
        ctx.save_for_backward(q, k, v, weights)
        return torch.bmm(weights, v).view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        found = _gradients(q, k, v, weights, _flat(grad))
        return *(x.view(shape) for x, shape in zip(found, ctx.shapes, strict=True)), None


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, chances: int) -> Tensor:
        keep = _drawn((*q.shape[:3], k.shape[2]), chances)
        ctx.save_for_backward(q, k, v, keep)
        ctx.causal, ctx.scale = causal, 1 / (1 - chances / CHANCES)  # what is kept makes up for what is dropped
        found, shape = [], q.shape
        for part in zip(*(x.split(_at_once(keep)) for x in (q, k, v, keep)), strict=True):
            q, k, v, kept = (_flat(x) for x in part)
            found.append(torch.bmm(_weights(q, k, causal).mul_(kept), v))
        return torch.cat(found).mul_(ctx.scale).view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, keep = ctx.saved_tensors
        found = []
        for part in zip(*(x.split(_at_once(keep)) for x in (*given, keep, grad)), strict=True):
            q, k, v, kept, of_out = (_flat(x) for x in part)
            found.append(_gradients(q, k, v, _weights(q, k, ctx.causal), of_out * ctx.scale, kept))
        whole = (torch.cat(parts) for parts in zip(*found, strict=True))
        return *(x.view(other.shape) for x, other in zip(whole, given, strict=True)), None, None


# For all heads of all rows, one behind the other: q (N, T, E), k and v (N, S, E), weights (N, T, S).


def _weights(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    # Added, which costs nothing here; the NaN of a hidden key shows, too.
    added = q.new_full((q.shape[1], k.shape[1]), -torch.inf).triu_(1) if causal else q.new_empty(())
    scores = torch.baddbmm(added, q, k.transpose(1, 2), beta=int(causal), alpha=q.shape[2] ** -0.5)
    return scores.softmax(dim=-1)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, of_out: Tensor, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v, from that of the output; the weights are used up where some are dropped."""
    if torch.is_grad_enabled():  # create_graph: the weights would count as constants
        raise RuntimeError('attention on a CPU has no second derivative; run all of it `with backend("reference"):`')
    of_weights = torch.bmm(of_out, v.transpose(1, 2))
    if kept is not None:
        of_weights.mul_(kept)
    of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
    seen = weights if kept is None else weights.mul_(kept)
    nothing, scale = q.new_empty(()), q.shape[2] ** -0.5
    return (
        torch.baddbmm(nothing, of_scores, k, beta=0, alpha=scale),
        torch.baddbmm(nothing, of_scores.transpose(1, 2), q, beta=0, alpha=scale),
        torch.bmm(seen.transpose(1, 2), of_out),
    )


def _flat(x: Tensor) -> Tensor:
    """(B, H, T, E) to (B · H, T, E)."""
    return x.reshape(-1, *x.shape[2:])


def _at_once(keep: Tensor) -> int:
    """Rows that are computed at once."""
    return max(1, WEIGHTS // max(1, keep[0].numel()))


def _drawn(shape: tuple[int, ...], chances: int) -> Tensor:
    """True for what is kept; of CHANCES, so many are against it."""
    count = torch.Size(shape).numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    return (bits.view(torch.int16)[:count] >= chances - CHANCES // 2).view(shape)
