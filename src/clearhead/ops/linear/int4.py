"""Prepacked int4 linear layers for the CPU, in groups of 32 weights.   M rows · K inputs · N outputs"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from clearhead.ops.linear.quantized import QuantizedLinear

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
GROUP = 32  # weights of half a byte that share a scale and a lowest value
BLOCK = 64  # outputs that the kernel for half bytes keeps together
MANY = 64  # rows from which on it pays to spread half bytes out to bf16


class Int4Linear(nn.Module):
    """y = x Wᵀ + b with W in 4 bits, a scale and a lowest value for each group; the product is in bf16.

    Few rows go through a kernel that spreads numbers out as it reads them; for many it is done once, for all of them.
    """

    packed: Tensor
    both: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        small = QuantizedLinear(linear, bits=4, group=GROUP)
        assert small.group_min is not None
        self.outputs, self.inputs = linear.weight.shape
        values = torch.stack([small.weight & 15, small.weight >> 4], dim=-1).flatten(1)  # (N, K), 0 to 15
        both = torch.stack([small.scale, small.group_min + 8 * small.scale], dim=-1).transpose(0, 1)
        self.register_buffer("packed", torch._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 1))
        self.register_buffer("both", both.to(torch.bfloat16).contiguous())  # (K/group, N, 2): scale, and middle
        self.bias = linear.bias
        self.can_spread = self.outputs % BLOCK == 0 and _has_blocks()

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        rows = x.reshape(-1, self.inputs).to(torch.bfloat16)
        if len(rows) < MANY or not self.can_spread:
            out = torch._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.both)
        else:
            out = torch.matmul(rows, self.spread()).transpose(0, 1)
        out = out.to(x.dtype).reshape(*x.shape[:-1], self.outputs)
        return out if self.bias is None else out.add_(self.bias)

    def spread(self) -> Tensor:
        """The weights in bf16, (N/64, K, 64): the kernel's order, of which every block is a matrix."""
        bytes = self.packed.view(-1, self.inputs, BLOCK // 2)
        values = torch.cat([bytes & 15, bytes >> 4], dim=2).view(torch.int8).sub_(8).to(torch.bfloat16)
        groups = values.view(len(bytes), -1, GROUP, BLOCK)
        scale, middle = self.both.view(-1, len(bytes), BLOCK, 2).permute(3, 1, 0, 2)[:, :, :, None].contiguous()
        return torch.addcmul(middle, groups, scale).view(len(bytes), self.inputs, BLOCK)


@cache
def _has_blocks() -> bool:
    """Whether the kernel keeps 64 outputs together, two in a byte, as it does with AVX-512."""
    values = torch.arange(2 * BLOCK * GROUP, dtype=torch.int32).view(2 * BLOCK, GROUP) * 7 % 16
    bytes = torch._convert_weight_to_int4pack_for_cpu(values, 1).reshape(-1, GROUP, BLOCK // 2)
    return torch.equal(torch.cat([bytes & 15, bytes >> 4], dim=2).transpose(1, 2).reshape(2 * BLOCK, GROUP), values)
