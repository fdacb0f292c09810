"""Linear layers in int8 (per output channel) or int4 (in groups), for GPUs and CPUs without the native kernels.

M rows · K inputs · N outputs

With int8, activations are quantized too, each row by its own absolute maximum, so that a row's result never depends on
the other rows of the batch. int4 is weight-only.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

log = logging.getLogger("clearhead")
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
INT8_MAX = 127  # symmetric: -128 is not used
TYPICAL_ROWS = 32  # the batch size that oneDNN lays weights out for; others work as well


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + b with W in int8 (a scale per output) or int4 (a scale and a minimum per group of inputs).

    int8 runs on integer matrix units; on a CPU the weight is repacked for oneDNN on first use, and int4 computes in
    bf16. Where there is no kernel, the weight is dequantized for the matmul: the same function, slower.
    """

    weight: Tensor
    scale: Tensor
    group_min: Tensor | None
    nonnegative = False  # whether the input is never negative, as after ReLU: same result, less work

    def __init__(self, linear: nn.Linear, bits: int = 8, group: int = 32):
        super().__init__()
        _check(bits, group)
        self.out_features, self.in_features = linear.weight.shape
        if bits == 4 and self.in_features % group:
            raise ValueError(f"group: {group} does not divide the {self.in_features} inputs; use one that does")
        self.bits, self.group = bits, group
        weight = linear.weight.detach().float()
        if bits == 8:
            quantized, scale = quantize_rows(weight)
            group_min = None
        else:
            quantized, scale, group_min = _quantize_groups(weight, group)
        self.register_buffer("weight", quantized)  # (N, K) int8, or (N, K/2) uint8 with two values per byte
        self.register_buffer("scale", scale)  # (N, 1), or (N, K/group)
        self.register_buffer("group_min", group_min)  # None, or (N, K/group)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        self._packed: PackedInt8Weight | tuple[Tensor, Tensor] | None = None  # the kernel's layout, made on first use

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        if x.dim() == 2 and isinstance(self._packed, PackedInt8Weight) and x.dtype == torch.float32:
            return self._packed(x)  # shortcut for decode steps, where every check costs
        rows = x.reshape(-1, self.in_features)
        if self.bits == 8 and _has_int8_matmul(rows, self.out_features):
            out = self._int8_matmul(rows)
        elif self.bits == 4 and rows.is_cpu and rows.dtype != torch.float64 and self.out_features % 16 == 0:
            out = self._int4_matmul(rows.to(torch.bfloat16))
        else:
            out = self._add_bias(F.linear(rows, self.dequantize().to(rows.dtype)))
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _add_bias(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out.add_(self.bias)

    def dequantize(self) -> Tensor:
        """Return the weight in fp32: (N, K)."""
        if self.group_min is None:
            return self.weight.float() * self.scale
        groups = unpack_int4(self.weight).unflatten(1, (-1, self.group)).float()  # (N, K/group, group)
        return (groups * self.scale[..., None] + self.group_min[..., None]).flatten(1)

    def _int8_matmul(self, rows: Tensor) -> Tensor:
        if rows.is_cpu and has_onednn_int8():
            return self.packed()(rows.float())
        quantized, scale = quantize_rows(rows.float())  # (M, K), (M, 1)
        if rows.is_cuda and len(rows) <= 16:  # torch._int_mm needs more than 16 rows on CUDA
            quantized = F.pad(quantized, (0, 0, 0, 17 - len(rows)))
        sums = torch._int_mm(quantized, self.weight.t())[: len(rows)]  # (M, N) int32, exact
        return self._add_bias(sums.float().mul_(self.scale.t()).mul_(scale))

    def packed(self) -> PackedInt8Weight:
        """Return the int8 weight in oneDNN's layout; needs `has_onednn_int8()`."""
        if not isinstance(self._packed, PackedInt8Weight):
            self._packed = PackedInt8Weight(self)
        return self._packed

    def _int4_matmul(self, rows: Tensor) -> Tensor:
        if not isinstance(self._packed, tuple):
            self._packed = pack_int4(self)
        packed, scale_and_mid = self._packed
        out = torch._weight_int4pack_mm_for_cpu(rows.contiguous(), packed, self.group, scale_and_mid)
        return self._add_bias(out)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._packed = None  # stale once the weight is moved, converted or (below) loaded
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._packed = None
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}"


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


class PackedInt8Weight:
    """An int8 weight in oneDNN's blocked layout, with its scale and bias.

    A plain object, because looking up a module's parameters takes as long as a small matmul.
    """

    def __init__(self, layer: QuantizedLinear):
        self.weights = torch.ops.onednn.qlinear_prepack(layer.weight, [TYPICAL_ROWS, layer.in_features])
        self.unpacked = layer.weight
        self.scale = layer.scale[:, 0].clone()  # (N,)
        self.zero_points = torch.zeros(layer.out_features, dtype=torch.int32)
        self.rounding_offset = torch.full((layer.in_features,), 1.5 * 2**23 + 128)
        self.bias = None if layer.bias is None else layer.bias.detach().float()
        self.nonnegative = layer.nonnegative

    def __call__(self, rows: Tensor) -> Tensor:
        """Quantize fp32 rows (M, K) and multiply them with the weight: (M, N)."""
        quantized, absmax = _quantize_rows_unsigned(rows, self.rounding_offset, self.nonnegative)
        return _scale_and_bias(self._matmul(quantized), absmax, self.bias)

    def _matmul(self, quantized: Tensor) -> Tensor:
        """uint8 rows (M, K) with zero point 128 times the weight and its scales: (M, N) in fp32."""
        if len(quantized) == 1:  # faster for a single row
            sums = torch._int_mm(quantized.bitwise_xor(128).view(torch.int8), self.unpacked.t())
            return sums.float().mul_(self.scale)
        return _onednn_int8_matmul(quantized, self.weights, self.scale, self.zero_points)


def _quantize_rows_unsigned(x: Tensor, rounding_offset: Tensor, nonnegative: bool) -> tuple[Tensor, Tensor]:
    """Like `quantize_rows` in fewer ops: uint8 rows with zero point 128, and each row's absolute maximum (M, 1).

    Adding 1.5 · 2²³ rounds a float to an integer, whose value is then in the low byte. A row of zeros quantizes to
    arbitrary bytes, which is fine because its result is multiplied by 0.
    """
    absmax = (x if nonnegative else x.abs()).amax(dim=1, keepdim=True)
    rounded = torch.addcmul(rounding_offset, x, absmax.reciprocal(), value=INT8_MAX)
    return rounded.view(torch.int32).to(torch.uint8), absmax


def _scale_and_bias(out: Tensor, absmax: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply out (M, N) by the row scales, absmax (M, 1) / 127, and add the bias (N,), in place."""
    if bias is None:
        return out.mul_(absmax / INT8_MAX)
    return torch.addcmul(bias, out, absmax, value=1 / INT8_MAX, out=out)


def _onednn_int8_matmul(quantized: Tensor, packed: Tensor, scale: Tensor, zero_points: Tensor) -> Tensor:
    """uint8 rows (M, K) with zero point 128 times a packed weight and its scales: (M, N) in fp32."""
    qlinear = torch.ops.onednn.qlinear_pointwise.default
    return qlinear(quantized, 1.0, 128, packed, scale, zero_points, None, 1.0, 0, torch.float32, "none", [], "")


def pack_int4(layer: QuantizedLinear) -> tuple[Tensor, Tensor]:
    """Return an int4 weight in the layout of torch's CPU kernel, and scale and midpoint per group (K/group, N, 2)."""
    assert layer.group_min is not None
    scale_and_mid = torch.stack([layer.scale, layer.group_min + 8 * layer.scale], dim=-1).transpose(0, 1)
    packed = torch._convert_weight_to_int4pack_for_cpu(unpack_int4(layer.weight).to(torch.int32), 1)
    return packed, scale_and_mid.to(torch.bfloat16).contiguous()


def unpack_int4(weight: Tensor) -> Tensor:
    """Unpack (N, K/2) bytes to (N, K) values from 0 to 15."""
    return torch.stack([weight & 15, weight >> 4], dim=-1).flatten(1)


@cache
def has_onednn_int8() -> bool:
    """Whether oneDNN's int8 matmul is available and exact: without VNNI or AMX it overflows in 16 bits."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        log.info("int8: this torch has no oneDNN int8 matmul; using torch._int_mm")
        return False
    largest = torch.full((2, 64), 255, dtype=torch.uint8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(torch.full((16, 64), 127, dtype=torch.int8), [2, 64])
        sums = _onednn_int8_matmul(largest, packed, torch.ones(16), torch.zeros(16, dtype=torch.int32))
    except RuntimeError as error:
        log.info("int8: oneDNN's matmul does not run here: %s; using torch._int_mm", error)
        return False
    exact = bool((sums == 127 * 127 * 64).all())
    if not exact:
        log.info("int8: oneDNN's matmul overflows on this CPU (no VNNI or AMX); using torch._int_mm")
    return exact


def _check(bits: int, group: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"bits: {bits!r} is not supported; use 8 or 4")
    if bits == 4 and group not in (32, 64, 128, 256):
        raise ValueError(f"group: {group!r} is not supported; use 32, 64, 128 or 256")


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x (M, K) to int8 from -127 to 127 with a scale per row (M, 1): x ≈ quantized · scale."""
    scale = x.abs().amax(dim=1, keepdim=True).div_(INT8_MAX).clamp_(min=1e-30)
    return (x / scale).round_().to(torch.int8), scale


def _quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize (N, K) to int4, two values per byte (N, K/2), with scale and minimum of each group (N, K/group)."""
    groups = weight.unflatten(1, (-1, group))  # (N, K/group, group)
    group_min, group_max = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((group_max - group_min) / 15).clamp(min=1e-30)
    values = ((groups - group_min[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.uint8).flatten(1)
    return values[:, 0::2] | (values[:, 1::2] << 4), scale, group_min


def _has_int8_matmul(rows: Tensor, out_features: int) -> bool:
    """Whether torch has an int8 matmul for this device and shape."""
    if rows.is_cpu:
        return True
    return rows.is_cuda and rows.shape[1] % 8 == 0 and out_features % 8 == 0
