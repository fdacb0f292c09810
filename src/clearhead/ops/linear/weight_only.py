"""Weight-only int8 and int4 linear layers, with a norm before and an activation or a sum after them.

M rows · K inputs · N outputs

Activations stay in floating point: a step of few rows is bound by reading weights. int8 has a scale per output, int4 a
scale and a minimum per output and group of neighboring inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.linear.quantized import quantize_rows

GROUPS = (128, 64, 32)
INT8_OFFSET = 128  # makes int8 weights, from -127 to 127, bytes that are not negative


@dataclass
class WeightOnlyLinear:
    """Weights of one linear layer, or of two with the same input whose outputs are gated: act(gate) · up."""

    weight: Tensor  # (N, K) in a floating dtype, or int32 words of 4 int8 or 8 int4 weights
    bias: Tensor | None = None  # (N,)
    scale: Tensor | None = None  # (N,) fp32 of int8, (N, K/group) of int4
    minimum: Tensor | None = None  # (N, K/group) of int4
    group: int = 0  # neighboring inputs whose words are together; in int4 they share a scale
    activation: str = "none"
    gated: bool = False  # the first N/2 outputs are the gate

    @property
    def bits(self) -> int:
        """16 (or more), 8 or 4."""
        return 16 if not self.group else 8 if self.minimum is None else 4

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self.weight.shape[1] * (32 // self.bits if self.group else 1)

    @property
    def out_features(self) -> int:
        """Outputs, after gating."""
        return len(self.weight) // (2 if self.gated else 1)

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads."""
        tensors = (self.weight, self.bias, self.scale, self.minimum)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def quantize(self, bits: int) -> Self:
        """Quantize to int8 or int4, if a group divides the inputs; else return the same layer."""
        group = next((size for size in GROUPS if self.in_features % size == 0), 0)
        if not group:
            return self
        weight, minimum = self.weight.detach().float(), None
        if bits == 8:
            quantized, scale = quantize_rows(weight)
            values, scale = quantized.to(torch.int32) + INT8_OFFSET, scale[:, 0]
        else:
            values, scale, minimum = _quantize_int4(weight, group, self.weight.dtype)
        words = pack_words(values, bits, group)
        return replace(self, weight=words, scale=scale, minimum=minimum, group=group)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (N, K)."""
        if self.scale is None:
            return self.weight.to(dtype)
        values = unpack_words(self.weight, self.bits, self.group)
        if self.minimum is None:
            return ((values - INT8_OFFSET) * self.scale[:, None]).to(dtype)
        groups = values.unflatten(1, (-1, self.group))  # (N, K/group, group)
        return (groups * self.scale[..., None].float() + self.minimum[..., None].float()).flatten(1).to(dtype)


def pack_words(values: Tensor, bits: int, group: int) -> Tensor:
    """Pack values (N, K), int32 from 0 to 2^bits - 1, to words (N, K·bits/32).

    Value i of word j of a group is its weight i · W + j, for W words, so that a kernel reads neighboring inputs.
    """
    parts = values.unflatten(1, (-1, 32 // bits, group * bits // 32))  # (N, K/group, values of a word, W)
    words = torch.zeros_like(parts[:, :, 0])
    for index in range(parts.shape[2]):
        words |= parts[:, :, index] << (bits * index)
    return words.flatten(1)


def unpack_words(words: Tensor, bits: int, group: int) -> Tensor:
    """Undo `pack_words`."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    parts = words.unflatten(1, (-1, 1, group * bits // 32))  # (N, K/group, 1, W)
    return ((parts >> shifts[:, None]) & ((1 << bits) - 1)).flatten(1)


def _quantize_int4(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize (N, K) to values from 0 to 15, with scales and minimums (N, K/group) in a dtype."""
    groups = weight.unflatten(1, (-1, group))  # (N, K/group, group)
    minimum = groups.amin(dim=2).to(dtype).float()
    scale = ((groups.amax(dim=2) - minimum) / 15).clamp_(min=1e-30).to(dtype).float()
    values = ((groups - minimum[..., None]) / scale[..., None]).round_().clamp_(0, 15)
    return values.flatten(1).to(torch.int32), scale.to(dtype), minimum.to(dtype)


def weight_only_linear(
    x: Tensor, linear: WeightOnlyLinear, norm: tuple[Tensor, float] | None = None, residual: Tensor | None = None
) -> Tensor:
    """The reference: act(norm(x) Wᵀ + b), plus a residual (M, N), for x (M, K); `norm`: RMSNorm's weight and eps."""
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], *norm)
    y = F.linear(x, linear.dequantize(x.dtype), linear.bias)
    return finish_linear(y, linear, residual)


def finish_linear(y: Tensor, linear: WeightOnlyLinear, residual: Tensor | None) -> Tensor:
    """Apply the activation and gate, and add the residual."""
    up = None
    if linear.gated:
        y, up = y.chunk(2, dim=-1)
    y = _ACTIVATIONS[linear.activation](y)
    y = y if up is None else y * up
    return y if residual is None else y + residual


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
