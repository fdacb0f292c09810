"""Linear weights packed for the native kernels: fp32, bf16, int8 and int4, as step/step.h describes them.

N outputs · K inputs · P panels of 16 outputs · G groups of 32 inputs
"""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.ops.native.structs import LANES, LinearStruct, check, level, pointer, step_library

GROUP = 32
KINDS = ("fp32", "bf16", "int8", "int4")
ARENA_SIZE = 1 << 25


class Arena:
    """Memory for packed weights in few large blocks, on huge pages where the system has them: fewer TLB misses."""

    def __init__(self) -> None:
        self.block, self.used = torch.empty(0, dtype=torch.uint8), 0

    def place(self, x: Tensor) -> Tensor:
        """Copy a tensor into the arena."""
        size = x.numel() * x.element_size()
        if self.used + size > len(self.block):
            block = mmap.mmap(-1, max(size, ARENA_SIZE))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
            self.block, self.used = torch.frombuffer(block, dtype=torch.uint8), 0
        placed = self.block[self.used : self.used + size].view(x.dtype).view(x.shape)
        self.used += -(-size // LANES // 4) * LANES * 4  # cache lines
        return placed.copy_(x)


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer as the native kernels read it."""

    kind: str
    outputs: int
    inputs: int
    weight: Tensor
    scales: Tensor | None = None  # fp16
    factor: float = 1.0
    bias: Tensor | None = None  # (P · 16)

    @cached_property
    def struct(self) -> LinearStruct:
        """The struct for ctypes; valid as long as this object."""
        pointers = (pointer(x) for x in (self.weight, self.scales, self.bias))
        return LinearStruct(*pointers, self.outputs, self.inputs, KINDS.index(self.kind), self.factor)

    def __call__(self, x: Tensor, threads: int | None = None, simd_level: int | None = None) -> Tensor:
        """x (M, K) in fp32 to (M, N)."""
        lib, rows, x = step_library(), len(x), x.contiguous()
        assert lib is not None, "check step_library() first"
        assert x.shape == (rows, self.inputs), f"expected (M, {self.inputs}), got {tuple(x.shape)}"
        assert x.dtype == torch.float32, f"expected float32, got {x.dtype}"
        out = torch.empty(rows, -(-self.outputs // LANES) * LANES)
        struct = ctypes.byref(self.struct)
        workspace = torch.empty(lib.clearhead_linear_workspace(struct, rows), dtype=torch.uint8)
        threads = torch.get_num_threads() if threads is None else threads
        simd_level = level() if simd_level is None else simd_level
        pointers = (out.data_ptr(), workspace.data_ptr())
        check(lib.clearhead_linear(struct, x.data_ptr(), rows, *pointers, simd_level, threads))
        return out[:, : self.outputs]

    def dequantize(self) -> Tensor:
        """Return the weight in fp32: (N, K)."""
        if self.kind in ("fp32", "bf16"):
            panels = self.weight.mT if self.kind == "fp32" else self.weight.float().permute(0, 2, 1, 3).flatten(2)
            return panels.flatten(0, 1)[: self.outputs, : self.inputs]
        assert self.scales is not None
        if self.kind == "int8":
            values = self.weight.permute(0, 2, 1, 3).flatten(2).float() - 128  # (P, 16, K)
            scales = self.scales.float().mT[..., None] * self.factor  # (P, 16, G, 1)
            groups = values.unflatten(2, (-1, GROUP)) * scales
        else:
            halves = torch.stack([self.weight & 15, self.weight >> 4], dim=3)  # (P, K/8, 16, 2, 4)
            values = halves.permute(0, 2, 1, 3, 4).flatten(2).float()
            scales = self.scales.float().permute(2, 0, 3, 1)[..., None] * self.factor  # (2, P, 16, G, 1)
            groups = values.unflatten(2, (-1, GROUP)) * scales[0] + scales[1]
        return groups.flatten(2).flatten(0, 1)[: self.outputs, : self.inputs]


class NativeLinear(nn.Module):
    """y = x Wᵀ + b in int8 or int4 by the native kernel, with the same result as in a native step."""

    def __init__(self, linear: nn.Linear, kind: str):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.packed, self.bias = pack_weight(linear.weight, linear.bias, kind), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        out = self.packed(x.reshape(-1, self.in_features).float())
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def dequantize(self) -> Tensor:
        """Return the weight in fp32: (N, K)."""
        return self.packed.dequantize()

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.packed.kind}"


@torch.no_grad()
def pack_weight(weight: Tensor, bias: Tensor | None, kind: str, arena: Arena | None = None) -> PackedWeight:
    """Pack a weight (N, K) and its bias (N,)."""
    outputs, inputs = weight.shape
    place = (arena or Arena()).place
    weight = weight.detach().float()
    weight = F.pad(weight, (0, -inputs % {"fp32": 1, "bf16": 2}.get(kind, GROUP), 0, -outputs % LANES))
    panels = weight.unflatten(0, (-1, LANES))  # (P, 16, K)
    scales, factor = None, 1.0
    if kind == "fp32":
        packed = panels.mT  # (P, K, 16)
    elif kind == "bf16":
        packed = panels.bfloat16().unflatten(2, (-1, 2)).transpose(1, 2)  # (P, K/2, 16, 2)
    else:
        quantize = quantize_int8 if kind == "int8" else quantize_int4
        values, scales, factor = quantize(panels.unflatten(2, (-1, GROUP)))
        packed, scales = pack_integers(values.flatten(2), scales, kind)
    padded_bias = None if bias is None else F.pad(bias.detach().float(), (0, -outputs % LANES))
    return PackedWeight(
        kind, outputs, inputs, place(packed), None if scales is None else place(scales), factor, padded_bias
    )


def pack_integers(values: Tensor, scales: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Lay out integers (P, 16, K), and scales (P, 16, G) of int8 or scales and minima (2, P, 16, G) of int4."""
    if kind == "int8":
        packed = values.to(torch.int16).add_(128).to(torch.uint8).unflatten(2, (-1, 4)).transpose(1, 2)
        return packed, scales.mT  # (P, K/4, 16, 4), (P, G, 16)
    halves = values.to(torch.uint8).unflatten(2, (-1, 2, 4)).permute(3, 0, 2, 1, 4)  # (2, P, K/8, 16, 4)
    return halves[0] | halves[1] << 4, scales.permute(1, 3, 0, 2)  # (P, K/8, 16, 4), (P, G, 2, 16)


def quantize_int8(groups: Tensor) -> tuple[Tensor, Tensor, float]:
    """Quantize (…, 32) to integers from -127 to 127; return them, scales (…) in fp16 and a factor of all scales."""
    scale = groups.abs().amax(dim=-1) / 127
    scales, factor = _to_fp16(scale)
    step = scales.float()[..., None] * factor
    return torch.where(step > 0, groups / step, 0).round_().clamp_(-127, 127), scales, factor


def quantize_int4(groups: Tensor) -> tuple[Tensor, Tensor, float]:
    """Quantize (…, 32) to integers from 0 to 15; return them, scales and minima (2, …) in fp16 and their factor."""
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    scales, factor = _to_fp16(torch.stack([(high - low) / 15, low]))
    step, minimum = scales.float()[..., None] * factor
    return torch.where(step > 0, (groups - minimum) / step, 0).round_().clamp_(0, 15), scales, factor


def _to_fp16(x: Tensor) -> tuple[Tensor, float]:
    """Return x divided by a power of two in fp16, and that factor: nothing overflows, whatever the weights' size."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    factor = 2.0 ** math.frexp(largest)[1] if 0 < largest < math.inf else 1.0
    return (x.double() / factor).half(), factor
