"""Attention whose weights are dropped at random, on a CPU, a few rows at a time: no table of all weights is ever kept.

B rows · H heads · T queries · S keys · E head width

torch's fused kernel has no dropout there, and its formula keeps three tables of (B, H, T, S) for the gradient. Here one
byte a weight is kept, and a quarter as many random numbers are drawn.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.model.masks import Mask

WEIGHTS = 1 << 20  # of the rows that are computed at once: they stay in the caches
WORTH = 16  # keys from which on computing a softmax twice is cheaper than keeping it
CHANCES = 1 << 16  # a random number of 64 bits decides about four weights


def drops(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> bool:
    """Whether `dropped_attention` does what is asked: dropout, all of many keys seen, fp32 on a CPU."""
    if not dropout or mask != Mask() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return q.is_cpu and q.dtype == torch.float32 and q.shape[1] == k.shape[1] and k.shape[2] >= WORTH


def dropped_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """softmax(q kᵀ / √E), dropped with this chance, times v: q (B, H, T, E), k and v (B, H, S, E) to (B, H, T, E)."""
    found: Tensor = _Dropped.apply(q, k, v, min(CHANCES - 1, round(dropout * CHANCES)))  # type: ignore[no-untyped-call]
    return found


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chances: int) -> Tensor:
        keep = _drawn((*q.shape[:3], k.shape[2]), chances)
        ctx.save_for_backward(q, k, v, keep)
        ctx.scale = 1 / (1 - chances / CHANCES)  # what is kept makes up for what is dropped
        parts = zip(*(x.split(_at_once(keep)) for x in (q, k, v, keep)), strict=True)
        found = [torch.bmm(_weights(q, k).mul_(kept.flatten(0, 1)), _flat(v)) for q, k, v, kept in parts]
        return torch.cat(found).mul_(ctx.scale).view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what was dropped would count as a constant
            raise RuntimeError("attention dropout on a CPU has no second derivative; set attention_dropout to 0")
        *given, keep = ctx.saved_tensors
        grads: list[list[Tensor]] = [[], [], []]
        for q, k, v, kept, out in zip(*(x.split(_at_once(keep)) for x in (*given, keep, grad)), strict=True):
            kept, out, weights = kept.flatten(0, 1), _flat(out) * ctx.scale, _weights(q, k)
            grads[2].append(torch.bmm((weights * kept).transpose(1, 2), out))
            of_weights = torch.bmm(out, _flat(v).transpose(1, 2)).mul_(kept)
            scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype).mul_(q.shape[3] ** -0.5)
            grads[0].append(torch.bmm(scores, _flat(k)))
            grads[1].append(torch.bmm(scores.transpose(1, 2), _flat(q)))
        return *(torch.cat(parts).view(x.shape) for parts, x in zip(grads, given, strict=True)), None


def _weights(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, T, E) and (B, H, S, E) to (B · H, T, S)."""
    q, k = _flat(q), _flat(k)
    return torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=q.shape[2] ** -0.5).softmax(dim=-1)


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
