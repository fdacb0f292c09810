"""Prepacked int4 linear layers for the CPU, in groups of 32 weights.   M rows · K inputs · N outputs"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from clearhead.ops.linear.quantized import QuantizedLinear, pack_int4

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
GROUP_SIZE = 32  # weights that share a scale and a minimum
BLOCK = 64  # outputs that torch's int4 kernel stores together
MIN_DEQUANTIZE_ROWS = 64  # from this batch size on, dequantizing the weight to bf16 once is faster


class Int4Linear(nn.Module):
    """y = x Wᵀ + b with W in int4, a scale and a minimum per group; the matmul is in bf16.

    Small batches use a kernel that dequantizes as it reads; for large ones the weight is dequantized once.
    """

    packed: Tensor
    scale_and_mid: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        packed, scale_and_mid = pack_int4(QuantizedLinear(linear, bits=4, group=GROUP_SIZE))
        self.register_buffer("packed", packed)
        self.register_buffer("scale_and_mid", scale_and_mid)  # (K/group, N, 2) bf16
        self.bias = linear.bias
        self.can_dequantize = self.out_features % BLOCK == 0 and _has_blocked_layout()

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if len(rows) < MIN_DEQUANTIZE_ROWS or not self.can_dequantize:
            out = torch._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP_SIZE, self.scale_and_mid)
        else:
            out = torch.matmul(rows, self.dequantize()).transpose(0, 1)
        out = out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out.add_(self.bias)

    def dequantize(self) -> Tensor:
        """Return the weight in bf16 as the kernel's blocks of outputs: (N/64, K, 64)."""
        packed = self.packed.view(-1, self.in_features, BLOCK // 2)
        values = torch.cat([packed & 15, packed >> 4], dim=2).view(torch.int8).sub_(8).to(torch.bfloat16)
        groups = values.view(len(packed), -1, GROUP_SIZE, BLOCK)
        scale, mid = self.scale_and_mid.view(-1, len(packed), BLOCK, 2).permute(3, 1, 0, 2)[:, :, :, None].contiguous()
        return torch.addcmul(mid, groups, scale).view(len(packed), self.in_features, BLOCK)


@cache
def _has_blocked_layout() -> bool:
    """Whether the kernel stores blocks of 64 outputs, two per byte, as it does with AVX-512."""
    values = torch.arange(2 * BLOCK * GROUP_SIZE, dtype=torch.int32).view(2 * BLOCK, GROUP_SIZE) * 7 % 16
    packed = torch._convert_weight_to_int4pack_for_cpu(values, 1).reshape(-1, GROUP_SIZE, BLOCK // 2)
    return torch.equal(
        torch.cat([packed & 15, packed >> 4], dim=2).transpose(1, 2).reshape(2 * BLOCK, GROUP_SIZE), values
    )
