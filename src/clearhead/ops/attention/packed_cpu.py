"""A packed row on a CPU, one run at a time: documents of one length that stand together need no padding and no mask.

D documents of a run · H heads · G key-value heads · N tokens · T queries · S keys · E head width
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.attention.sdpa import small_q_attention
from clearhead.ops.masks import Mask

WORTH = 8  # tokens that a run has to have on average: each costs some calls
SHORT = 128  # keys up to which two batched products beat torch's kernel
VECTOR = 16  # numbers that a CPU takes at once; the softmax of fewer is slower than that of so many


def runs_refuse(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> str | None:
    """Why a row cannot be taken by runs; None if it can."""
    if mask.documents is None:
        return "the row is not packed"
    if q.device.type != "cpu":
        return "it is for CPUs"
    if torch.compiler.is_compiling():
        return "runs differ from row to row, which would be compiled again"
    if len(mask.runs) * WORTH > q.shape[2]:
        return "neighbors differ in length"
    return None


def by_runs(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, rows: Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
) -> Tensor:
    """A packed row (1, H, N, E), each run of it by `rows` as (D, H, T, E), all of them real."""
    each, runs = replace(mask, documents=None), mask.runs
    queries, keys = [count * tokens for count, tokens, _ in runs], [count * tokens for count, _, tokens in runs]
    parts = zip(runs, q[0].split(queries, 1), k[0].split(keys, 1), v[0].split(keys, 1), strict=True)
    found = []
    for (count, tokens, seen), q, k, v in parts:
        q = q.unflatten(1, (count, tokens)).transpose(0, 1)  # (D, H, T, E)
        k, v = (x.unflatten(1, (count, seen)).transpose(0, 1) for x in (k, v))  # (D, G, S, E)
        found.append(rows(q, k, v, each.simplified(seen)).transpose(1, 2).flatten(0, 1))  # (D · T, H, E)
    return (found[0] if len(found) == 1 else torch.cat(found)).transpose(0, 1)[None]


def is_short(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> bool:
    """Whether `short` does what is asked, and is faster: few keys, all of them seen, for reading in fp32."""
    if mask.causal or mask.pattern.kind != "full" or dropout or q.requires_grad:
        return False
    return k.shape[2] <= SHORT and q.shape[1] == k.shape[1] and q.dtype == torch.float32


def short(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q (D, H, T, E) to all of k and v (D, H, S, E)."""
    keys = k.shape[2]
    if not VECTOR // 2 <= keys < VECTOR:
        return small_q_attention(q, k, v, None).view(q.shape)
    k, v = (F.pad(x, (0, 0, 0, VECTOR - keys)).flatten(0, 1) for x in (k, v))  # (D · H, 16, E)
    hidden = q.new_zeros(VECTOR)
    hidden[keys:] = -math.inf
    scores = torch.baddbmm(hidden, q.reshape(-1, *q.shape[2:]), k.transpose(1, 2), alpha=q.shape[3] ** -0.5)
    return torch.bmm(scores.softmax(dim=-1), v).view(q.shape)
