"""Attention over all keys: the written-out formula, and torch's fused kernel.

B rows · H heads · G key-value heads · T queries · S keys · E head width
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

FEW_ON_CPU, MANY_HEADS = 8, 64  # queries, and rows times heads, for which a CPU is faster without torch's kernel
SHORT = 32  # tokens of rows for which it is faster so, too, as those of an encoder
MANY_KEYS = 1 << 18  # numbers, from which on keys do not wait in a CPU's nearest cache
FEW = 64  # queries up to which repeating the mask is cheaper than repeating keys and values


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    causal: bool = False,
    no_empty_rows: bool = False,
) -> Tensor:
    """torch's scaled_dot_product_attention for grouped heads; a query that may look at nothing gets zeros.

    q (B, H, T, E); k and v (B, G, S, E); `allowed` broadcasts to (B, 1, T, S). With `all_see` the caller knows that no
    query is left without a key, and may give numbers to add to the scores instead of a truth table.
    """
    heads, groups, shape = q.shape[1], k.shape[1], q.shape
    few = shape[2] == 1 or (shape[2] <= FEW and not causal)
    if heads != groups and few and (mask is None or mask.shape[1] == 1):  # a group joins the query axis
        q = q.reshape(shape[0], groups, -1, shape[3])  # (B, G, H/G · T, E)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, heads // groups, 1)
        heads, causal = groups, False
    if not dropout and not causal and heads == groups and _is_small(q, k) and (mask is None or no_empty_rows):
        return small_q_attention(q, k, v, mask).reshape(shape)
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, enable_gqa=heads != groups)
        return out.reshape(shape)
    if heads != groups:  # the kernel that takes a mask takes no groups
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
    if no_empty_rows:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).reshape(shape)
    blind = ~mask.any(dim=-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | blind, dropout_p=dropout)
    return out.masked_fill(blind, 0).reshape(shape)


def _is_small(q: Tensor, k: Tensor) -> bool:
    """Whether two batched products beat torch's kernel: many heads with little to do, on a CPU, for reading."""
    if q.device.type != "cpu" or q.dtype != torch.float32 or q.requires_grad:
        return False
    little = q.shape[2] <= FEW_ON_CPU or max(q.shape[2], k.shape[2]) <= SHORT
    return little and q.shape[0] * q.shape[1] >= MANY_HEADS


def small_q_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    """`attention` where every query sees a key; `allowed` may be numbers to add."""
    (rows, heads, queries, dim), keys = q.shape, k.shape[2]
    q, k, v = (x.reshape(rows * heads, -1, dim) for x in (q, k, v))
    if queries == 1 or k.numel() >= MANY_KEYS:  # one after the other, as they lie in memory
        scores = torch.baddbmm(q.new_empty(()), k, q.transpose(1, 2), beta=0, alpha=dim**-0.5)
        scores = scores.transpose(1, 2).contiguous()  # (B · H, T, S); of one query, it is so already
    else:
        scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=dim**-0.5)
    if allowed is not None:
        each = scores.view(rows, heads, queries, keys)
        _ = each.masked_fill_(~allowed, -math.inf) if allowed.dtype == torch.bool else each.add_(allowed)
    return torch.bmm(scores.softmax(dim=-1), v)


def bf16_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """The same for keys and values in bf16, without gaps between the heads; `hidden` is added to the scores."""
    (rows, heads, queries, dim), keys = q.shape, k.shape[2]
    q = q.to(k.dtype, memory_format=torch.contiguous_format)
    q, k, v = (x.reshape(rows * heads, -1, dim) for x in (q, k, v))
    scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=dim**-0.5).float()
    if hidden is not None:
        scores.view(rows, heads, queries, keys).add_(hidden)
    return torch.bmm(scores.softmax(dim=-1).to(k.dtype), v)
