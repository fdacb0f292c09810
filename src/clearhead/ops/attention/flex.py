"""FlexAttention on a GPU, for windows and summaries.   H heads · T queries · S keys"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from clearhead.ops.attention.sparse import count_summaries, gather_summaries
from clearhead.ops.masks import Mask, Pattern


def flex_refuses(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> str | None:
    """Return why FlexAttention cannot be used, or None if it can."""
    head_dim, pattern = q.shape[-1], mask.pattern
    reasons = {
        "it needs a CUDA device": q.device.type != "cuda",
        "it is for windows and summaries": pattern.kind not in ("window", "summary"),
        "the row is packed": mask.documents is not None,
        "queries and keys are not the same positions": mask.start is not None or q.shape[2] != k.shape[2],
        "padding must be masked": mask.needs_padding_mask,
        "it has no dropout": dropout > 0,
        "head_dim must be a power of two from 16 to 256": not 16 <= head_dim <= 256 or head_dim & (head_dim - 1) != 0,
        "it has no float64": q.dtype == torch.float64,
        "the row ends before its first summary": pattern.kind == "summary"
        and count_summaries(q.shape[2], pattern) == 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Attention in a window, or over gathered summaries; masked blocks of 128 × 128 are skipped."""
    from torch.nn.attention.flex_attention import flex_attention

    tokens = q.shape[2]
    if mask.pattern.kind == "summary":
        k, v = gather_summaries(k, mask.pattern), gather_summaries(v, mask.pattern)
    options: dict[str, Any] = {
        "block_mask": _block_mask(tokens, k.shape[2], mask.pattern, mask.causal, q.device),
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if torch.compiler.is_compiling():  # part of the caller's graph
        return flex_attention(q, k, v, **options)
    # Past its recompile limit torch would run this uncompiled, and materialize all T × S scores.
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10_000):
        return _compiled_flex()(q, k, v, **options)


@lru_cache(maxsize=64)
def _block_mask(tokens: int, keys: int, pattern: Pattern, causal: bool, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    size, summary = pattern.size, pattern.summary

    def in_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < size) if causal else (i - j).abs() < size

    def is_summary(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        position = j // summary * size + size - summary + j % summary  # of the j-th gathered key, before gathering
        return position <= i if causal else j >= 0

    mask_mod = in_window if pattern.kind == "window" else is_summary
    return create_block_mask(mask_mod, None, None, tokens, keys, device=device)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
