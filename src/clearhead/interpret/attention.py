"""Attention weights, Q/K/V and per-head updates of the residual stream.

B batch · T queries · S keys · H heads · G key-value heads · E head dim · D model dim
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.errors import UserError
from clearhead.inference.fused_layers import FusedAttention
from clearhead.model.attention import Attention
from clearhead.ops.attention.dispatch import attention_with_weights
from clearhead.ops.linear.packed_weight import NativeLinear
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


class AttentionTraces(Mapping[str, AttentionTrace]):
    """The captured attention layers by module name: `traces[name]` is the last pass, `traces.passes[name]` all passes.

    Generation with a KV cache is a pass over the prompt, then one for each new token.
    """

    def __init__(self) -> None:
        self.passes: dict[str, list[AttentionTrace]] = {}

    def __getitem__(self, name: str) -> AttentionTrace:
        return self.passes[name][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def joined(self, name: str) -> AttentionTrace:
        """All passes of one call with a KV cache as one pass: queries of all passes (T), keys of the last (S).

        The batch must have the same rows in all passes, as it has for one text and without beam search.
        """
        passes = self.passes[name]
        last = passes[-1]
        keys = [trace.weights.shape[-1] for trace in passes]
        if len({len(trace.q) for trace in passes}) > 1 or keys != sorted(keys):
            raise UserError(f"{name}: the passes are not steps of one call; capture one text, or read traces.passes")
        weights = [F.pad(trace.weights, (0, keys[-1] - count)) for trace, count in zip(passes, keys, strict=True)]
        q, updates = (torch.cat([getattr(trace, part) for trace in passes], dim=2) for part in ("q", "updates"))
        output = torch.cat([trace.output for trace in passes], dim=1)
        return replace(last, weights=torch.cat(weights, dim=2), q=q, updates=updates, output=output)


@contextmanager
def capture_attention(network: nn.Module) -> Iterator[AttentionTraces]:
    """Capture every attention layer of a network (or model) that runs inside the `with`, by module name.

        with capture_attention(model.network) as traces:
            model.translate("Good morning!", beam=1)
        traces["decoder.layers.0.attention"].weights  # the last pass: the last decode step
        traces.joined("decoder.layers.0.cross_attention").weights  # all passes: (1, H, T, S)

    Inside the `with`, a model's methods run the reference network, one batch at a time. A batch of an encoder is one
    packed row of several texts. If no pass was captured, an error is raised at the end. Weights are those before
    attention dropout. The passes themselves do not change; memory grows with T × S of every pass.
    """
    network = getattr(network, "network", network)  # a Model holds its network
    if not isinstance(network, nn.Module):
        raise UserError(f"capture_attention: {type(network).__name__} is not a model; load one, or pass its network")
    layers = {name: module for name, module in network.named_modules() if isinstance(module, Attention)}
    if any(isinstance(layer, FusedAttention) for layer in layers.values()):
        raise UserError(
            "capture_attention: this network is optimized for inference, where layers run fused; "
            "capture model.network of a model loaded without dtype"
        )
    traces = AttentionTraces()
    handles = [layer.register_forward_hook(_capture(name, traces), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield traces
    finally:
        for handle in handles:
            handle.remove()
    if not traces:
        raise UserError(
            "capture_attention: no attention layer of this network ran inside the `with`; "
            "make the engine inside it, and capture the network that runs"
        )


def _capture(name: str, traces: AttentionTraces) -> Any:
    @torch.no_grad()
    def hook(layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        traces.passes.setdefault(name, []).append(trace_attention(layer, output, *args, **kwargs))

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
        k, v = (x.clone() for x in cache.read())  # later steps write into the cache
    elif layer.is_cross and cache is not None:
        k, v = cache.source
    else:
        k, v = layer.project_kv(encoder_output if layer.is_cross else x, rope)
    heads, weights = attention_with_weights(q, k, v, replace(mask, pattern=layer.pattern))
    return AttentionTrace(weights, q, k, v, per_head_updates(layer, heads), layer.output.bias, output)


def per_head_updates(layer: Attention, heads: Tensor) -> Tensor:
    """What each head adds to the residual stream: (B, H, T, E) to (B, H, T, D)."""
    output: Any = layer.output
    matrix = output.dequantize() if isinstance(output, QuantizedLinear | NativeLinear) else output.weight  # (D, H·E)
    slices = matrix.to(heads.dtype).unflatten(1, (layer.heads, -1))  # (D, H, E): the output projection of each head
    return torch.einsum("bhte,dhe->bhtd", heads, slices)
