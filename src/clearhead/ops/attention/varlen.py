"""Variable-length flash attention for packed rows on a GPU (torch's varlen_attn).

H heads · N tokens of a packed row · E head dim
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from clearhead.ops.masks import Mask

DTYPES = (torch.bfloat16, torch.float16)


@cache
def varlen_options() -> frozenset[str]:
    """Return the parameters of this torch's varlen_attn, which differ between releases; empty if it has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # imported here because it takes a second
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def varlen_refuses(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> str | None:
    """Return why variable-length flash attention cannot be used, or None if it can."""
    if mask.documents is None:
        return "the row is not packed"
    if q.device.type != "cuda":
        return "it needs a CUDA device"
    if q.dtype not in DTYPES:
        return "it needs bf16 or fp16"
    if dropout > 0:
        return "it has no dropout"
    if q.shape[-1] > 256 or q.shape[-1] % 8 != 0:
        return "head_dim must be a multiple of 8 up to 256"
    if mask.pattern.kind not in ("full", "window"):
        return "it has only full and window patterns"
    if not varlen_options():
        return "this torch has no varlen_attn"
    if mask.pattern.kind == "window" and "window_size" not in varlen_options():
        return "this torch's varlen_attn has no window"
    return None


def varlen(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Attention in each document of a packed row (1, H, N, E), without padding."""
    from torch.nn.attention.varlen import varlen_attn

    assert mask.documents is not None
    queries, keys = mask.documents
    options: dict[str, Any] = {}
    if "window_size" in varlen_options():
        reach = mask.pattern.size - 1 if mask.pattern.kind == "window" else -1  # -1: unlimited
        options["window_size"] = (reach, 0 if mask.causal else reach)
    else:
        options["is_causal"] = mask.causal
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in varlen_options():
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (N, H, E)
    out: Any = varlen_attn(q, k, v, queries.starts, keys.starts, queries.max_length, keys.max_length, **options)
    return out.transpose(0, 1)[None]
