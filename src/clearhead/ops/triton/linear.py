"""Triton linear layers for decode steps of one row, fused with RMSNorm, activation and residual; norms and gates.

M rows · K inputs · N outputs · F features
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.ops.linear.weight_only import WeightOnlyLinear

try:
    from clearhead.ops.triton import linear_kernels as kernels
except ImportError:  # no Triton on this platform
    kernels = None  # type: ignore[assignment]


class Tile(NamedTuple):
    """Outputs of a program, inputs of an iteration, and warps."""

    n: int
    k: int
    warps: int


def row_linear(
    x: Tensor,
    linear: WeightOnlyLinear,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    dependent: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Like `weight_only_linear`, for x (M, K) of one row or very few; the output may have another dtype.

    With quantized weights, x and the norm's weight are fp32. `dependent` kernels start before the one before them has
    ended; the first kernel of a captured step must not.
    """
    rows, inputs = x.shape
    outputs = linear.out_features
    out = x.new_empty(rows, outputs, dtype=dtype)
    tile = tile or choose_tile(outputs, inputs, linear)
    # Unused arguments must be tensors too.
    tensors = (linear.scale, linear.minimum, linear.bias, norm[0] if norm else None, residual)
    scale, minimum, bias, gain, added = (x if tensor is None else tensor for tensor in tensors)
    flags = (linear.bias is not None, norm is not None, residual is not None, linear.gated, linear.activation)
    shape = (inputs, linear.bits, linear.group, *flags, tile.n, max(tile.k, linear.group))
    kernels.row_linear[(-(-outputs // tile.n) * rows,)](
        x, linear.weight, scale, minimum, bias, gain, added, out, rows, outputs, norm[1] if norm else 0.0, *shape,
        dependent, num_warps=tile.warps, launch_pdl=dependent,
    )  # fmt: skip
    return out


def choose_tile(outputs: int, inputs: int, linear: WeightOnlyLinear) -> Tile:
    """Return a tile, tuned on an H200. Vectors of inputs are as long as those of weights with 2K/warps inputs."""
    if linear.bits == 16:
        return Tile(2, 2048, 4) if outputs >= 8192 else Tile(4, 1024, 8 if inputs > 4096 else 4)
    return Tile(4, 2048, 4 if linear.bits == 8 else 2)


def dequantize(linear: WeightOnlyLinear, dtype: torch.dtype) -> Tensor:
    """Return the weight (N, K) of a quantized layer; others as they are."""
    if linear.bits == 16:
        return linear.weight
    out = linear.weight.new_empty(len(linear.weight), linear.in_features, dtype=dtype)
    block_n, block_k = 8, max(512, linear.group)
    minimum = linear.scale if linear.minimum is None else linear.minimum
    kernels.dequantize[(-(-len(out) // block_n), -(-linear.in_features // block_k))](
        linear.weight, linear.scale, minimum, out, len(out), linear.in_features, linear.bits, linear.group, block_n,
        block_k, num_warps=4,
    )  # fmt: skip
    return out


def gate(x: Tensor, activation: str, dependent: bool = False) -> Tensor:
    """act(x[:, :F]) · x[:, F:] for contiguous x (M, 2F)."""
    rows, features = len(x), x.shape[1] // 2
    out, block = x.new_empty(rows, features), 1024
    kernels.gate[(rows, -(-features // block))](
        x, out, features, activation, block, dependent, num_warps=4, launch_pdl=dependent
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, dependent: bool = False) -> Tensor:
    """RMSNorm of contiguous x (M, F)."""
    out, block = torch.empty_like(x), 1 << (x.shape[1] - 1).bit_length()
    warps = max(1, min(8, block // 512))
    kernels.rms_norm[(len(x),)](
        x, weight, out, eps, x.shape[1], block, dependent, num_warps=warps, launch_pdl=dependent
    )
    return out


def begin_step(
    ids: Tensor, rows: Tensor, numbers: Tensor, last_tokens: Tensor, positions: Tensor, frequencies: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the ids (N,) of a step, -1 being the last token of its row, and rotary cosines and sines (N, E/2)."""
    tokens, out = len(ids), torch.empty_like(ids)
    half = 0 if frequencies is None else len(frequencies)
    cos, sin = (ids.new_empty(tokens, half, dtype=torch.float32) for _ in range(2))
    frequency = ids if frequencies is None else frequencies
    block = 1 << (half - 1).bit_length() if half else 1
    kernels.begin_step[(tokens,)](
        ids, rows, numbers, last_tokens, positions, frequency, out, cos, sin, half > 0, half, block, num_warps=1
    )
    return out, (cos, sin) if half else None
