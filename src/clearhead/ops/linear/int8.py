"""Prepacked int8 linear layers and embeddings for the CPU (FBGEMM); portable and CUDA int8/int4: quantized.py.

M rows · K inputs · N outputs
"""

from __future__ import annotations

import logging
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.ops.linear.quantized import quantize_rows

log = logging.getLogger("clearhead")
MIN_SCALE = 6.1e-5  # FBGEMM's smallest activation scale


class Int8Linear(nn.Module):
    """y = x Wᵀ + b with W in int8, a scale per output; activations are quantized to 8 bits too, each row by itself.

    FBGEMM quantizes activations by the range of the whole batch. A single row is passed as it is. Several rows are
    quantized here by the same rule, and one extra row fixes the batch's range so that FBGEMM rounds nothing again.
    """

    range_row: Tensor
    weight_sums: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        quantized, scale = quantize_rows(linear.weight.detach().float())  # (N, K), (N, 1)
        self.packed, self.bias = _pack(quantized, scale[:, 0]), linear.bias
        self.matmul = torch.ops.quantized.linear_dynamic.default  # looked up once
        self.register_buffer("weight_sums", quantized.sum(dim=1) * scale[:, 0])  # (N,) for the zero points
        range_row = torch.zeros(1, self.in_features)
        range_row[0, 0], range_row[0, -1] = -128, 127
        self.register_buffer("range_row", range_row)

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        if x.numel() == self.in_features:
            out = self.matmul(x.float(), self.packed, False)
        else:
            rows = x.reshape(-1, self.in_features).float()
            quantized, scale, zero_point = _quantize_asymmetric(rows)  # (M, K), (M, 1), (M, 1)
            out = self.matmul(torch.cat([quantized, self.range_row]), self.packed, False)[:-1]
            out = out.addcmul_(zero_point, self.weight_sums, value=-1).mul_(scale)
            out = out.reshape(*x.shape[:-1], self.out_features)
        return (out if self.bias is None else out.add_(self.bias)).to(x.dtype)


def _quantize_asymmetric(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows (M, K) to integers from -128 to 127, kept in fp32: x ≈ (quantized - zero_point) · scale."""
    low, high = rows.amin(dim=1, keepdim=True).clamp_(max=0), rows.amax(dim=1, keepdim=True).clamp_(min=0)
    step = (high.double() - low.double()) / 255
    step = torch.where(step.float() == 0, 0.1, step)
    zero_point = (-low / step).round().clamp(0, 255).float() - 128
    scale = step.clamp(min=MIN_SCALE).float()
    return (rows * (1 / scale)).round_().add_(zero_point).clamp_(-128, 127), scale, zero_point


def _pack(quantized: Tensor, scale: Tensor) -> Any:
    """Return FBGEMM's packed weight object."""
    with warnings.catch_warnings():
        # torch deprecates quantized tensors; once they are gone, `has_int8_kernel` is False.
        warnings.simplefilter("ignore")
        zero_points = torch.zeros(len(scale), dtype=torch.long)
        weight = torch._make_per_channel_quantized_tensor(quantized.contiguous(), scale.double(), zero_points, 0)
        return torch.ops.quantized.linear_prepack(weight, None)


class Int8Embedding(nn.Module):
    """An embedding table in int8 with a scale per row."""

    weight: Tensor
    scale: Tensor

    def __init__(self, table: nn.Embedding):
        super().__init__()
        self.num_embeddings = table.num_embeddings
        quantized, scale = quantize_rows(table.weight.detach().float())
        self.register_buffer("weight", quantized)
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (…) to (…, D)."""
        return F.embedding(ids, self.weight) * F.embedding(ids, self.scale)


@cache
def has_int8_kernel() -> bool:
    """Whether FBGEMM's int8 kernel is available and exact: without VNNI it overflows in 16 bits."""
    if "fbgemm" not in torch.backends.quantized.supported_engines or not hasattr(torch.ops.quantized, "linear_dynamic"):
        log.info("int8: this torch has no FBGEMM linear_dynamic; using the portable int8 layers")
        return False
    try:
        packed = _pack(torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16))
        largest = torch.full((1, 64), 255.0)
        largest[0, 0] = 0
        exact = bool((torch.ops.quantized.linear_dynamic(largest, packed, False) == 127 * 255 * 63).all())
    except (RuntimeError, AttributeError) as error:
        log.info("int8: FBGEMM does not run here: %s; using the portable int8 layers", error)
        return False
    if not exact:
        log.info("int8: FBGEMM overflows on this CPU (no VNNI); using the portable int8 layers")
    return exact
