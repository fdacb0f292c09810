"""GPU kernels of torch: variable-length flash attention for packed rows, FlexAttention for windows and summaries.

Both are looked at before they are used: a dtype, a head width or a dropout they do not know is refused in words.
"""

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from clearhead.model.masks import Mask, Pattern
from clearhead.model.sparse import gather_summaries, summaries

HALF = (torch.bfloat16, torch.float16)


def flex_refuses(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> str | None:
    """Why FlexAttention cannot be used; None if it can."""
    width, pattern = q.shape[-1], mask.pattern
    reasons = {
        "it needs a CUDA device": q.device.type != "cuda",
        "it is here for windows and summaries": pattern.kind not in ("window", "summary"),
        "the row is packed": mask.documents is not None,
        "queries and keys are not the same positions": mask.start is not None
        or mask.paths is not None
        or q.shape[2] != k.shape[2],
        "padding has to be hidden": mask.needs_lengths,
        "it has no dropout": dropout > 0,
        "its head width is a power of two from 16 to 256": not 16 <= width <= 256 or width & (width - 1) != 0,
        "it has no float64": q.dtype == torch.float64,
        "the row ends before its first summary": pattern.kind == "summary" and summaries(q.shape[2], pattern) == 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """A window, or gathered summaries, by FlexAttention: blocks of 128 × 128 out of sight are never computed."""
    from torch.nn.attention.flex_attention import flex_attention

    tokens = q.shape[2]
    if mask.pattern.kind == "summary":
        k, v = gather_summaries(k, mask.pattern), gather_summaries(v, mask.pattern)
    options: dict[str, Any] = {
        "block_mask": _visible_blocks(tokens, k.shape[2], mask.pattern, mask.causal, q.device),
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if torch.compiler.is_compiling():  # whoever compiles the layer compiles this with it
        return flex_attention(q, k, v, **options)
    # Past its limit of recompilations torch would run this uncompiled, which fills a table of all pairs.
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10_000):
        return _compiled_flex()(q, k, v, **options)


@lru_cache(maxsize=64)
def _visible_blocks(tokens: int, keys: int, pattern: Pattern, causal: bool, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    size, summary = pattern.size, pattern.summary

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < size) if causal else (i - j).abs() < size

    def gathered(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = j // summary * size + size - summary + j % summary  # where the j-th gathered key stood
        return place <= i if causal else j >= 0

    return create_block_mask(near if pattern.kind == "window" else gathered, None, None, tokens, keys, device=device)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def varlen_options() -> frozenset[str]:
    """What this torch's varlen_attn can be told, since releases differ; empty where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # late: it brings a second's worth of imports with it
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def varlen_refuses(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> str | None:
    """Why variable-length flash attention cannot be used; None if it can."""
    if mask.documents is None:
        return "the row is not packed"
    if q.device.type != "cuda":
        return "it needs a CUDA device"
    if q.dtype not in HALF:
        return "it needs bf16 or fp16"
    if dropout > 0:
        return "it has no dropout"
    if q.shape[-1] > 256 or q.shape[-1] % 8 != 0:
        return "its head width is a multiple of 8 up to 256"
    if mask.pattern.kind not in ("full", "window"):
        return "it knows full and window alone"
    if not varlen_options():
        return "this torch has no varlen_attn"
    if mask.pattern.kind == "window" and "window_size" not in varlen_options():
        return "this torch's varlen_attn has no window"
    return None


def varlen(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """A packed row (1, H, N, E) by flash attention over document boundaries; no padding anywhere."""
    from torch.nn.attention.varlen import varlen_attn

    assert mask.documents is not None
    ours, theirs = mask.documents
    options: dict[str, Any] = {}
    if "window_size" in varlen_options():
        back = mask.pattern.size - 1 if mask.pattern.kind == "window" else -1
        options["window_size"] = (back, 0 if mask.causal else back)
    else:
        options["is_causal"] = mask.causal
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in varlen_options():
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (N, H, E)
    out: Any = varlen_attn(q, k, v, ours.starts, theirs.starts, ours.longest, theirs.longest, **options)
    return out.transpose(0, 1)[None]
