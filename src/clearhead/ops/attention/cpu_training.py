"""fp32 training on a CPU: attention by batched matmuls, where they beat torch's fused kernel.

B batch · H heads · T queries · S keys · E head dim · N = B · H

Short rows keep their weights for the backward pass. With dropout, which the fused kernel lacks on a CPU and whose plain
formula keeps three tables of (B, H, T, S), only a boolean keep mask is saved; weights are recomputed, a few rows at a
time, and one 64-bit random number decides four weights.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops.masks import Mask

MIN_QUERIES = 1024  # over all rows and heads; below, the overhead of extra calls dominates
MIN_KEYS, MAX_KEYS = 17, 128  # where two matmuls and a softmax beat the fused kernel, without dropout
MAX_SAVED_WEIGHTS = 1 << 22
MIN_DROPOUT_KEYS = 24  # from here on recomputing the softmax is cheaper than saving it
CHUNK_WEIGHTS = 1 << 20  # weights computed at once with dropout, to stay in the caches
RANDOM_LEVELS = 1 << 16  # dropout is decided by 16 random bits a weight


def cpu_training_refuses(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> str | None:
    """Return why matmuls cannot, or should not, be used, or None if they should."""
    if not q.is_cpu or q.dtype != torch.float32:
        return "it is for fp32 on a CPU"
    if torch.is_autocast_enabled("cpu"):
        return "it has no autocast"
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

        if dropout or not statically_known_true(q.shape[:3].numel() * k.shape[2] <= MAX_SAVED_WEIGHTS):
            return "it is compiled for static shapes without dropout only"
    elif torch._C._are_functorch_transforms_active():
        return "it does not support torch.func"
    if mask.documents is not None or mask.pattern.kind != "full" or mask.start is not None:
        return "it is for plain rows"
    if q.shape[2] != k.shape[2] if mask.causal else mask.lengths is not None:  # a causal mask hides padding
        return "some keys are masked"
    if q.shape[1] != k.shape[1]:
        return "key-value heads are grouped"
    # With dropout also under no_grad, so that recomputation in activation checkpointing draws the same keep mask.
    if not dropout and not (q.requires_grad and torch.is_grad_enabled()):
        return "no gradient is needed"
    queries, keys = q.shape[:3].numel(), k.shape[2]
    faster = (
        keys >= MIN_DROPOUT_KEYS if dropout else MIN_KEYS <= keys <= MAX_KEYS and queries * keys <= MAX_SAVED_WEIGHTS
    )
    return None if faster and queries >= MIN_QUERIES else "torch's kernel is as fast"


def matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    """Return softmax(q kᵀ / √E) v with dropout on the weights: q (B, H, T, E), k and v (B, H, S, E) to (B, H, T, E)."""
    if dropout:
        level = min(RANDOM_LEVELS - 1, round(dropout * RANDOM_LEVELS))
        return _DropoutAttention.apply(q, k, v, mask.causal, level)  # type: ignore[no-untyped-call]
    return _MatmulAttention.apply(q, k, v, mask.causal)  # type: ignore[no-untyped-call]


class _MatmulAttention(torch.autograd.Function):
    """Without dropout: saves the weights."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        ctx.shapes, shape = [x.shape for x in (q, k, v)], q.shape
        q, k, v = (_flatten_heads(x) for x in (q, k, v))
        weights = _weights(q, k, causal)
        ctx.save_for_backward(q, k, v, weights)
        return torch.bmm(weights, v).view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        grads = _backward(q, k, v, weights, _flatten_heads(grad))
        return *(x.view(shape) for x, shape in zip(grads, ctx.shapes, strict=True)), None


class _DropoutAttention(torch.autograd.Function):
    """With dropout: saves the keep mask, and computes in chunks of rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, level: int) -> Tensor:
        keep = _keep_mask((*q.shape[:3], k.shape[2]), level)
        ctx.save_for_backward(q, k, v, keep)
        ctx.causal, ctx.scale = causal, 1 / (1 - level / RANDOM_LEVELS)
        outputs, shape = [], q.shape
        for chunk in zip(*(x.split(_chunk_rows(keep)) for x in (q, k, v, keep)), strict=True):
            q, k, v, kept = (_flatten_heads(x) for x in chunk)
            outputs.append(torch.bmm(_weights(q, k, causal).mul_(kept), v))
        return torch.cat(outputs).mul_(ctx.scale).view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, keep = ctx.saved_tensors
        chunks = []
        for chunk in zip(*(x.split(_chunk_rows(keep)) for x in (*inputs, keep, grad)), strict=True):
            q, k, v, kept, grad_out = (_flatten_heads(x) for x in chunk)
            chunks.append(_backward(q, k, v, _weights(q, k, ctx.causal), grad_out * ctx.scale, kept))
        grads = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return *(x.view(given.shape) for x, given in zip(grads, inputs, strict=True)), None, None


# Below, rows and heads are flattened: q (N, T, E), k and v (N, S, E), weights (N, T, S).


def _weights(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    # An additive mask costs nothing in baddbmm, and lets the NaN of a masked key propagate.
    attn_bias = q.new_full((q.shape[1], k.shape[1]), -torch.inf).triu_(1) if causal else q.new_empty(())
    scores = torch.baddbmm(attn_bias, q, k.transpose(1, 2), beta=int(causal), alpha=q.shape[2] ** -0.5)
    return scores.softmax(dim=-1)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, grad_out: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; with `keep`, `weights` are overwritten."""
    if torch.is_grad_enabled():  # create_graph: autograd would take the weights for constants
        raise RuntimeError(
            'attention on a CPU has no second derivative; run it under `with attention_backend("reference"):`'
        )
    grad_weights = torch.bmm(grad_out, v.transpose(1, 2))
    if keep is not None:
        grad_weights.mul_(keep)
    grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    dropped = weights if keep is None else weights.mul_(keep)
    unused, scale = q.new_empty(()), q.shape[2] ** -0.5
    return (
        torch.baddbmm(unused, grad_scores, k, beta=0, alpha=scale),
        torch.baddbmm(unused, grad_scores.transpose(1, 2), q, beta=0, alpha=scale),
        torch.bmm(dropped.transpose(1, 2), grad_out),
    )


def _flatten_heads(x: Tensor) -> Tensor:
    """(B, H, T, E) to (B · H, T, E)."""
    return x.reshape(-1, *x.shape[2:])


def _chunk_rows(keep: Tensor) -> int:
    """Return how many rows to compute at once."""
    return max(1, CHUNK_WEIGHTS // max(1, keep[0].numel()))


def _keep_mask(shape: tuple[int, ...], level: int) -> Tensor:
    """Draw a boolean mask, False with probability level / RANDOM_LEVELS."""
    count = torch.Size(shape).numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    return (bits.view(torch.int16)[:count] >= level - RANDOM_LEVELS // 2).view(shape)
