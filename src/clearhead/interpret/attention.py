"""Attention weights, Q/K/V and per-head updates of the residual stream.

B batch · T queries · S keys · H heads · G key-value heads · E head dim · D model dim
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.model.attention import Attention
from clearhead.ops.attention.dispatch import attention_with_weights
from clearhead.ops.linear.quantized import QuantizedLinear


@dataclass(frozen=True)
class AttentionTrace:
    """One attention layer in one forward pass.

    `updates` is what each head adds to the residual stream: its output times its slice of the output projection. Summed
    over heads, plus `bias`, they are the layer's output.
    """

    weights: Tensor  # (B, H, T, S)
    q: Tensor  # (B, H, T, E), after rotary positions
    k: Tensor  # (B, G, S, E), after rotary positions
    v: Tensor  # (B, G, S, E)
    updates: Tensor  # (B, H, T, D)
    bias: Tensor | None  # (D,), of the output projection
    output: Tensor  # (B, T, D)


@contextmanager
def capture_attention(network: nn.Module) -> Iterator[dict[str, AttentionTrace]]:
    """Capture every attention layer that runs inside the `with`, by module name; later passes overwrite earlier ones.

        with capture_attention(network) as traces:
            network(ids)
        traces["decoder.layers.0.attention"].weights

    Weights are those before attention dropout. The pass itself does not change; memory grows with T × S.
    """
    traces: dict[str, AttentionTrace] = {}
    handles = [
        module.register_forward_hook(_capture(name, traces), with_kwargs=True)
        for name, module in network.named_modules()
        if isinstance(module, Attention)
    ]
    try:
        yield traces
    finally:
        for handle in handles:
            handle.remove()


def _capture(name: str, traces: dict[str, AttentionTrace]) -> Any:
    @torch.no_grad()
    def hook(layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        traces[name] = trace_attention(layer, output, *args, **kwargs)

    return hook


def trace_attention(
    layer: Attention,
    output: Tensor,
    x: Tensor,
    mask: Any,
    encoder_output: Any = None,
    rope: Any = None,
    cache: Any = None,
) -> AttentionTrace:
    """Recompute the layer on the same input with the reference attention."""
    q = layer.project_q(x, rope)
    if not layer.is_cross and cache is not None:  # the pass has just written this step's keys
        k, v = cache.read()
    elif layer.is_cross and cache is not None:
        k, v = cache.source
    else:
        k, v = layer.project_kv(encoder_output if layer.is_cross else x, rope)
    heads, weights = attention_with_weights(q, k, v, replace(mask, pattern=layer.pattern))
    return AttentionTrace(weights, q, k, v, per_head_updates(layer, heads), layer.output.bias, output)


def per_head_updates(layer: Attention, heads: Tensor) -> Tensor:
    """What each head adds to the residual stream: (B, H, T, E) to (B, H, T, D)."""
    matrix = layer.output.dequantize() if isinstance(layer.output, QuantizedLinear) else layer.output.weight  # (D, H·E)
    slices = matrix.to(heads.dtype).unflatten(1, (layer.heads, -1))  # (D, H, E): the output projection of each head
    return torch.einsum("bhte,dhe->bhtd", heads, slices)
