"""Packed rows on a CPU: runs of equally long documents become batches that need no padding and no mask.

D documents of a run · H heads · G key-value heads · N tokens of a packed row · T queries · S keys · E head dim
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.attention.sdpa import small_q_attention
from clearhead.ops.masks import Mask

MIN_RUN_TOKENS = 8  # on average: each run costs a few calls
MAX_SHORT_KEYS = 128  # up to here two batched matmuls beat torch's fused kernel
VECTOR = 16  # a softmax over fewer keys is slower than over this many, a full vector register


def packed_cpu_refuses(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> str | None:
    """Return why a row cannot be split into runs, or None if it can."""
    if mask.documents is None:
        return "the row is not packed"
    if q.device.type != "cpu":
        return "it is for CPUs"
    if torch.compiler.is_compiling():
        return "runs differ from row to row, and each would be compiled again"
    if len(mask.runs) * MIN_RUN_TOKENS > q.shape[2]:
        return "neighboring documents differ in length"
    return None


def attend_runs(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, attend_run: Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
) -> Tensor:
    """Split a packed row (1, H, N, E) into runs (D, H, T, E), attend in each by `attend_run`, and pack the outputs."""
    unpacked, runs = replace(mask, documents=None), mask.runs
    q_sizes, k_sizes = [count * queries for count, queries, _ in runs], [count * keys for count, _, keys in runs]
    parts = zip(runs, q[0].split(q_sizes, 1), k[0].split(k_sizes, 1), v[0].split(k_sizes, 1), strict=True)
    outputs = []
    for (count, queries, keys), q, k, v in parts:
        q = q.unflatten(1, (count, queries)).transpose(0, 1)  # (D, H, T, E)
        k, v = (x.unflatten(1, (count, keys)).transpose(0, 1) for x in (k, v))  # (D, G, S, E)
        out = attend_run(q, k, v, unpacked.simplified(keys))  # (D, H, T, E)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # (D · T, H, E)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).transpose(0, 1)[None]  # (1, H, N, E)


def can_use_short_attention(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> bool:
    """Return whether `short_attention` applies and is faster: few keys, no mask, fp32 inference."""
    if mask.causal or mask.pattern.kind != "full" or dropout or q.requires_grad:
        return False
    return k.shape[2] <= MAX_SHORT_KEYS and q.shape[1] == k.shape[1] and q.dtype == torch.float32


def short_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q (D, H, T, E) over k and v (D, H, S, E) without a mask; 8 to 15 keys are padded to 16."""
    keys = k.shape[2]
    if not VECTOR // 2 <= keys < VECTOR:
        return small_q_attention(q, k, v, None).view(q.shape)
    k, v = (F.pad(x, (0, 0, 0, VECTOR - keys)).flatten(0, 1) for x in (k, v))  # (D · H, 16, E)
    attn_bias = q.new_zeros(VECTOR)
    attn_bias[keys:] = -math.inf
    scores = torch.baddbmm(attn_bias, q.reshape(-1, *q.shape[2:]), k.transpose(1, 2), alpha=q.shape[3] ** -0.5)
    return torch.bmm(scores.softmax(dim=-1), v).view(q.shape)
