"""Prepacked int8 linear layers and embeddings for the CPU (FBGEMM kernels).   M rows · K inputs · N outputs"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.ops.linear.quantized import quantize_rows

SMALLEST = 6.1e-5  # a step between two numbers that the kernel does not go below


class Int8Linear(nn.Module):
    """y = x Wᵀ + b with W in 8 bits, a scale for each output; the rows of x are rounded to 8 bits too, each by itself.

    The kernel (FBGEMM) rounds by the range of all that it is given. One row is given as it is. Several are rounded
    here, by the same rule, and one more row beside them makes their range such that nothing is rounded twice.
    """

    edges: Tensor
    sums: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape
        numbers, scale = quantize_rows(linear.weight.detach().float())  # (N, K), (N, 1)
        self.packed, self.bias = _pack(numbers, scale[:, 0]), linear.bias
        self.product = torch.ops.quantized.linear_dynamic.default  # a look-up costs
        self.register_buffer("sums", numbers.sum(dim=1) * scale[:, 0])  # (N,) what 1 everywhere would give
        edges = torch.zeros(1, self.inputs)
        edges[0, 0], edges[0, -1] = -128, 127
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        if x.numel() == self.inputs:
            out = self.product(x.float(), self.packed, False)
        else:
            rows = x.reshape(-1, self.inputs).float()
            numbers, scale, zero = _rounded(rows)  # (M, K) from -128 to 127, (M, 1), (M, 1)
            out = self.product(torch.cat([numbers, self.edges]), self.packed, False)[:-1]
            out = out.addcmul_(zero, self.sums, value=-1).mul_(scale).reshape(*x.shape[:-1], self.outputs)
        return (out if self.bias is None else out.add_(self.bias)).to(x.dtype)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows (M, K) as whole numbers from -128 to 127 with scale and zero (M, 1): x ≈ (number - zero) · scale."""
    lowest, highest = rows.amin(dim=1, keepdim=True).clamp_(max=0), rows.amax(dim=1, keepdim=True).clamp_(min=0)
    step = (highest.double() - lowest.double()) / 255
    step = torch.where(step.float() == 0, 0.1, step)
    zero = (-lowest / step).round().clamp(0, 255).float() - 128
    scale = step.clamp(min=SMALLEST).float()
    return (rows * (1 / scale)).round_().add_(zero).clamp_(-128, 127), scale, zero


def _pack(numbers: Tensor, scale: Tensor) -> Any:
    """The kernel's own object, which holds the weights in its order."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch means to drop quantized tensors; without them `has_int8_kernel` is False
        zeros = torch.zeros(len(scale), dtype=torch.long)
        weight = torch._make_per_channel_quantized_tensor(numbers.contiguous(), scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)


class Int8Embedding(nn.Module):
    """A table of 8-bit rows, a scale for each."""

    weight: Tensor
    scale: Tensor

    def __init__(self, table: nn.Embedding):
        super().__init__()
        self.num_embeddings = table.num_embeddings
        numbers, scale = quantize_rows(table.weight.detach().float())
        self.register_buffer("weight", numbers)
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (…) to (…, D)."""
        return F.embedding(ids, self.weight) * F.embedding(ids, self.scale)


@cache
def has_int8_kernel() -> bool:
    """Whether the kernel is here and exact: without VNNI it adds pairs in 16 bits, which overflow."""
    if "fbgemm" not in torch.backends.quantized.supported_engines or not hasattr(torch.ops.quantized, "linear_dynamic"):
        return False
    try:
        packed = _pack(torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16))
        most = torch.full((1, 64), 255.0)
        most[0, 0] = 0
        return bool((torch.ops.quantized.linear_dynamic(most, packed, False) == 127 * 255 * 63).all())
    except (RuntimeError, AttributeError):
        return False
