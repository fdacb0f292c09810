"""Linear layers with small weights: int8 for each output channel, or int4 in groups.   M rows · K inputs · N outputs

With int8, the activations are rounded too, each row by its own largest value: a row's result never depends on the
rows beside it. With int4 only the weights are small.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.ops.native import library as native

log = logging.getLogger("clearhead")
LARGEST = 127  # of signed bytes, so that -127 is there too
ROWS = 32  # of a typical step, for which weights are laid out; others work as well


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + b with W in 8 bits, a scale for each output, or in 4, a scale and a lowest value for each group.

    Eight bits run on integer matrix units; on a CPU a second copy, in the order of its kernel, is laid out when first
    needed. Where those are missing, and always for four bits in fp32, the weights are spread out to floating point for
    the product: the same function, slower.
    """

    weight: Tensor
    scale: Tensor
    group_min: Tensor | None
    nonnegative = False  # whether what it reads never is below 0, as behind a relu: rounded the same, with less work

    def __init__(self, linear: nn.Linear, bits: int = 8, group: int = 32):
        super().__init__()
        _check(bits, group)
        self.outputs, self.inputs = linear.weight.shape
        if bits == 4 and self.inputs % group:
            raise ValueError(f"group: {group} does not divide the {self.inputs} inputs; use one that does")
        self.bits, self.group = bits, group
        weight = linear.weight.detach().float()
        if bits == 8:
            quantized, scale = quantize_rows(weight)
            lowest = None
        else:
            quantized, scale, lowest = _quantize_groups(weight, group)
        self.register_buffer("weight", quantized)  # (N, K) int8, or (N, K/2) uint8 with two values a byte
        self.register_buffer("scale", scale)  # (N, 1), or (N, K/group)
        self.register_buffer("group_min", lowest)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        self._packed: PackedInt8Weight | tuple[Tensor, Tensor] | None = (
            None  # the same weights as a kernel wants them, once used
        )

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        if x.dim() == 2 and isinstance(self._packed, PackedInt8Weight) and x.dtype == torch.float32:
            return self._packed(x)  # most steps of a search: nothing else is asked
        rows = x.reshape(-1, self.inputs)
        if self.bits == 8 and _has_int8_matmul(rows, self.outputs):
            out = self._int8_matmul(rows)
        elif self.bits == 4 and rows.dtype == torch.bfloat16 and rows.is_cpu and self.outputs % 16 == 0:
            out = self._int4_matmul(rows)
        else:
            out = self._biased(F.linear(rows, self.dequantize().to(rows.dtype)))
        return out.to(x.dtype).reshape(*x.shape[:-1], self.outputs)

    def _biased(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out.add_(self.bias)

    def dequantize(self) -> Tensor:
        """The weights in fp32, as close to the original as the bits allow: (N, K)."""
        if self.group_min is None:
            return self.weight.float() * self.scale
        pairs = torch.stack([self.weight & 15, self.weight >> 4], dim=-1).flatten(1)  # (N, K), values 0 to 15
        groups = pairs.unflatten(1, (-1, self.group)).float()  # (N, K/group, group)
        return (groups * self.scale[..., None] + self.group_min[..., None]).flatten(1)

    def _int8_matmul(self, rows: Tensor) -> Tensor:
        if rows.is_cpu and has_onednn_int8():
            return self.packed()(rows.float())
        numbers, scale = quantize_rows(rows.float())  # (M, K), (M, 1)
        if rows.is_cuda and len(rows) <= 16:  # CUDA's product wants more than 16 rows
            numbers = F.pad(numbers, (0, 0, 0, 17 - len(rows)))
        sums = torch._int_mm(numbers, self.weight.t())[: len(rows)]  # (M, N) int32, exact
        return self._biased(sums.float().mul_(self.scale.t()).mul_(scale))

    def packed(self) -> PackedInt8Weight:
        """The same 8-bit weights as oneDNN wants them, on a CPU that multiplies bytes."""
        if not isinstance(self._packed, PackedInt8Weight):
            self._packed = PackedInt8Weight(self)
        return self._packed

    def _int4_matmul(self, rows: Tensor) -> Tensor:
        if not isinstance(self._packed, tuple):
            self._packed = _pack_four(self)
        out = torch._weight_int4pack_mm_for_cpu(rows.contiguous(), self._packed[0], self.group, self._packed[1])
        return self._biased(out)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._packed = None  # moved or turned; below, loaded: what was laid out is no longer true
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._packed = None
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}, bits={self.bits}"


class PackedInt8Weight:
    """Eight-bit weights in oneDNN's blocks, and what else their product needs: not in the module, whose parameters
    take as long to find as a small product takes."""

    def __init__(self, layer: QuantizedLinear):
        self.weights = torch.ops.onednn.qlinear_prepack(layer.weight, [ROWS, layer.inputs])
        self.plain = layer.weight
        self.scale, self.zeros = layer.scale[:, 0].clone(), torch.zeros(layer.outputs, dtype=torch.int32)  # (N,)
        self.shift = torch.full((layer.inputs,), 1.5 * 2**23 + 128)
        self.bias = None if layer.bias is None else layer.bias.detach().float()
        self.nonnegative, self.native = layer.nonnegative, native.supports(layer.inputs, layer.outputs)

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows (M, K) in fp32, each rounded by itself, to (M, N)."""
        if self.native:
            return native.dequantize(self.raw(native.quantize(native.GemmOutput(rows.contiguous()))))
        unsigned, largest = _unsigned_rows(rows, self.shift, self.nonnegative)
        return _spread_rows(self.product(unsigned), largest, self.bias)

    def raw(self, small: native.QuantizedRows) -> native.GemmOutput:
        """Rows (M, K) in bytes to what native code goes on with."""
        return native.GemmOutput(self.product(small.numbers), small.scales, self.bias)

    def product(self, unsigned: Tensor) -> Tensor:
        """Bytes (M, K), 128 standing for 0, times the weights: (M, N) in fp32."""
        if len(unsigned) == 1:  # faster so
            sums = torch._int_mm(unsigned.bitwise_xor(128).view(torch.int8), self.plain.t())
            return sums.float().mul_(self.scale)
        return _onednn_int8_matmul(unsigned, self.weights, self.scale, self.zeros)


def _unsigned_rows(x: Tensor, shift: Tensor, nonnegative: bool) -> tuple[Tensor, Tensor]:
    """As `quantize_rows` in as few operations as torch allows: numbers with 128 added, and each row's largest (M, 1).

    A float behind 1.5 · 2²³ is a whole number, rounded by the addition itself, whose lowest byte is the one wanted. In
    a row of zeros it is any byte, since what comes of it is multiplied by 0.
    """
    largest = (x if nonnegative else x.abs()).amax(dim=1, keepdim=True)
    whole = torch.addcmul(shift, x, largest.reciprocal(), value=LARGEST)
    return whole.view(torch.int32).to(torch.uint8), largest


def _spread_rows(out: Tensor, largest: Tensor, bias: Tensor | None) -> Tensor:
    """out (M, N) of rows that were rounded by their largest values (M, 1), plus the bias (N,); in place."""
    if bias is None:
        return out.mul_(largest / LARGEST)
    return torch.addcmul(bias, out, largest, value=1 / LARGEST, out=out)


def _onednn_int8_matmul(unsigned: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """Bytes (M, K), 128 standing for 0, times packed weights: (M, N) in fp32, already times the weights' scales."""
    product = torch.ops.onednn.qlinear_pointwise.default
    return product(unsigned, 1.0, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], "")


def _pack_four(layer: QuantizedLinear) -> tuple[Tensor, Tensor]:
    """The kernel's order of the same numbers, from -8 up, and scale and middle of each group (K/group, N, 2)."""
    assert layer.group_min is not None
    values = torch.stack([layer.weight & 15, layer.weight >> 4], dim=-1).flatten(1).to(torch.int32)
    both = torch.stack([layer.scale, layer.group_min + 8 * layer.scale], dim=-1).transpose(0, 1)
    return torch._convert_weight_to_int4pack_for_cpu(values, 1), both.to(torch.bfloat16).contiguous()


@cache
def has_onednn_int8() -> bool:
    """Whether oneDNN multiplies bytes exactly here: without VNNI or AMX it adds in 16 bits, which overflow."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    largest = torch.full((2, 64), 255, dtype=torch.uint8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(torch.full((16, 64), 127, dtype=torch.int8), [2, 64])
        sums = _onednn_int8_matmul(largest, packed, torch.ones(16), torch.zeros(16, dtype=torch.int32))
    except RuntimeError:
        return False
    return bool((sums == 127 * 127 * 64).all())


def _check(bits: int, group: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"bits: {bits!r} is not supported; use 8 or 4")
    if bits == 4 and group not in (32, 64, 128, 256):
        raise ValueError(f"group: {group!r} is not supported; use 32, 64, 128 or 256")


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) as int8 from -127 to 127, with the scale (M, 1) of each row: x ≈ numbers · scale."""
    scale = x.abs().amax(dim=1, keepdim=True).div_(LARGEST).clamp_(min=1e-30)
    return (x / scale).round_().to(torch.int8), scale


def _quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(N, K) as two 4-bit values a byte (N, K/2), with scale and lowest value (N, K/group) of each group."""
    groups = weight.unflatten(1, (-1, group))  # (N, K/group, group)
    lowest, highest = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((highest - lowest) / 15).clamp(min=1e-30)
    values = ((groups - lowest[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.uint8).flatten(1)
    return values[:, 0::2] | (values[:, 1::2] << 4), scale, lowest


def _has_int8_matmul(rows: Tensor, outputs: int) -> bool:
    """Whether torch has an int8 matrix product for this device and shape."""
    if rows.is_cpu:
        return True
    return rows.is_cuda and rows.shape[1] % 8 == 0 and outputs % 8 == 0


def quantize_module(module: nn.Module, bits: int = 8, group: int = 32) -> nn.Module:
    """Replace every linear layer below `module` by its small form, in place; for inference, it has no gradient.

    An output matrix tied to the embedding gets a small copy; the embedding stays as it is. A layer whose width no
    group divides keeps its full weights, and the log says so.
    """
    _check(bits, group)
    for name, child in list(module.named_children()):
        if not isinstance(child, nn.Linear):
            quantize_module(child, bits, group)
        elif bits == 4 and child.in_features % group:
            log.warning("%s keeps its weights: its %d inputs are no multiple of %d", name, child.in_features, group)
        else:
            setattr(module, name, QuantizedLinear(child, bits, group))
    return module
