"""Attention by torch's scaled_dot_product_attention, and by batched matmuls where those are faster on a CPU.

B batch · H heads · G key-value heads · T queries · S keys · E head dim
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

# On a CPU matmuls are faster for few queries or short rows, if there are many heads.
MAX_CPU_QUERIES = 8
MAX_CPU_TOKENS = 32
MIN_BATCH_HEADS = 64  # B · H
LARGE_KEYS = 1 << 18  # values; from here on k no longer fits a core's cache
MAX_REPEATED_QUERIES = 64  # up to here repeating the mask for a group is cheaper than repeating k and v


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    causal: bool = False,
    no_empty_rows: bool = False,
) -> Tensor:
    """Attention with grouped heads; a fully masked query gets zeros.

    q (B, H, T, E); k and v (B, G, S, E); `mask` broadcasts to (B, 1, T, S). With `no_empty_rows` the caller guarantees
    that every query attends to some key, and may pass an additive bias instead of booleans.
    """
    heads, kv_heads, shape = q.shape[1], k.shape[1], q.shape
    fold_groups = shape[2] == 1 or (shape[2] <= MAX_REPEATED_QUERIES and not causal)
    if heads != kv_heads and fold_groups and (mask is None or mask.shape[1] == 1):  # fold each group into the queries
        q = q.reshape(shape[0], kv_heads, -1, shape[3])  # (B, G, H/G · T, E)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, heads // kv_heads, 1)
        heads, causal = kv_heads, False
    has_rows = mask is None or no_empty_rows
    if not dropout and not causal and heads == kv_heads and has_rows and _is_small(q, k):
        return small_q_attention(q, k, v, mask).reshape(shape)
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, enable_gqa=heads != kv_heads)
        return out.reshape(shape)
    if heads != kv_heads:  # torch's kernels with a mask do not take grouped heads
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    if no_empty_rows:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).reshape(shape)
    fully_masked = ~mask.any(dim=-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | fully_masked, dropout_p=dropout)
    return out.masked_fill(fully_masked, 0).reshape(shape)


def _is_small(q: Tensor, k: Tensor) -> bool:
    """Return whether two batched matmuls beat torch's kernel: fp32 inference on a CPU, many heads, little work each."""
    if q.device.type != "cpu" or q.dtype != torch.float32 or q.requires_grad:
        return False
    small = q.shape[2] <= MAX_CPU_QUERIES or max(q.shape[2], k.shape[2]) <= MAX_CPU_TOKENS
    return small and q.shape[0] * q.shape[1] >= MIN_BATCH_HEADS


def small_q_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention by matmuls, without fully masked queries: q (B, H, T, E), k and v (B, H, S, E) to (B · H, T, E).

    `mask` is boolean or an additive bias, and broadcasts to (B, H, T, S).
    """
    (rows, heads, queries, dim), keys = q.shape, k.shape[2]
    q, k, v = (x.reshape(rows * heads, -1, dim) for x in (q, k, v))  # (B · H, T or S, E)
    if queries == 1 or k.numel() >= LARGE_KEYS:  # k qᵀ reads k in memory order
        scores = torch.baddbmm(q.new_empty(()), k, q.transpose(1, 2), beta=0, alpha=dim**-0.5)
        scores = scores.transpose(1, 2).contiguous()  # (B · H, T, S); no copy for one query
    else:
        scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=dim**-0.5)
    if mask is not None:
        view = scores.view(rows, heads, queries, keys)
        _ = view.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else view.add_(mask)
    return torch.bmm(scores.softmax(dim=-1), v)
