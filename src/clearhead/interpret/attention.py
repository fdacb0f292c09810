"""What attention did: the weights of every head, and what each head added to the residual stream.

B rows · T queries · S keys · H heads · E head width · D width
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
    """One attention layer at work.

    The notes' "value-up" view: the output matrix, cut into one piece a head, carries each head's find back to the width
    of the model. Joining the heads and multiplying by the whole matrix is the same as adding up the pieces, so
    updates.sum(1) + bias is the layer's output, which is what goes into the residual stream.
    """

    weights: Tensor  # (B, H, T, S)
    updates: Tensor  # (B, H, T, D)
    bias: Tensor | None  # (D,), which belongs to no head
    output: Tensor  # (B, T, D)


@contextmanager
def capture_attention(network: nn.Module) -> Iterator[dict[str, AttentionTrace]]:
    """Every attention layer that runs inside the `with` leaves a Look under its name; the last pass counts.

        with watch(network) as looks:
            network(ids)
        looks["decoder.layers.0.attention"].weights

    Weights are those before attention dropout. The pass itself is not changed; it costs memory for all pairs.
    """
    looks: dict[str, AttentionTrace] = {}
    handles = [
        module.register_forward_hook(_remember(name, looks), with_kwargs=True)
        for name, module in network.named_modules()
        if isinstance(module, Attention)
    ]
    try:
        yield looks
    finally:
        for handle in handles:
            handle.remove()


def _remember(name: str, looks: dict[str, AttentionTrace]) -> Any:
    @torch.no_grad()
    def hook(layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        looks[name] = trace_attention(layer, output, *args, **kwargs)

    return hook


def trace_attention(
    layer: Attention,
    output: Tensor,
    x: Tensor,
    mask: Any,
    encoder_output: Any = None,
    rotation: Any = None,
    cache: Any = None,
) -> AttentionTrace:
    """The layer's work on the same input once more, by the written-out formula."""
    q = layer.project_q(x, rotation)
    if not layer.is_cross and cache is not None:  # the pass has just written this step's keys
        k, v = cache.read()
    elif layer.is_cross and cache is not None:
        k, v = cache.source
    else:
        k, v = layer.project_kv(encoder_output if layer.is_cross else x, rotation)
    found, weights = attention_with_weights(q, k, v, replace(mask, pattern=layer.pattern))
    return AttentionTrace(weights, per_head_updates(layer, found), layer.output.bias, output)


def per_head_updates(layer: Attention, found: Tensor) -> Tensor:
    """What each head adds to the residual stream: (B, H, T, E) to (B, H, T, D)."""
    matrix = layer.output.dequantize() if isinstance(layer.output, QuantizedLinear) else layer.output.weight  # (D, H·E)
    pieces = matrix.to(found.dtype).unflatten(1, (layer.heads, -1))  # (D, H, E): the value-up matrix of each head
    return torch.einsum("bhte,dhe->bhtd", found, pieces)
