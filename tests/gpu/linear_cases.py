"""Random inputs of the Triton linear layers, and a check against the reference in fp64."""

from typing import Any

import torch

from clearhead.ops.linear.weight_only import WeightOnlyLinear, weight_only_linear
from clearhead.ops.triton.linear import Tile, dequantize, row_linear

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
OFFSET_ERROR = {16: 0.0, 8: 3e-4, 4: 2e-3}  # quantized weights are multiplied together with an offset
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check_linear(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    bits: int = 16,
    normed: bool = False,
    added: bool = False,
    biased: bool = False,
    device: str = "cuda",
    tile: Tile | None = None,
    **options: Any,
) -> float:
    """Compare with the reference in fp64 over the same quantized weights; return the relative error."""
    gated = options.get("gated", False)
    weight = (torch.randn(outputs * (2 if gated else 1), inputs, device=device) / inputs**0.5).to(dtype)
    bias = torch.randn(len(weight), device=device).to(dtype) if biased else None
    linear = WeightOnlyLinear(weight, bias, **options)
    linear = linear if bits == 16 else linear.quantize(bits)
    x = torch.randn(rows, inputs, device=device).to(dtype)
    gain = (1 + 0.1 * torch.randn(inputs, device=device)).to(dtype)
    residual = torch.randn(rows, outputs, device=device).to(dtype) if added else None
    exact = WeightOnlyLinear(linear.dequantize(torch.float64), None if bias is None else bias.double(), **options)
    norm = (gain, 1e-5) if normed else None
    expected = weight_only_linear(
        x.double(), exact, (gain.double(), 1e-5) if normed else None, None if residual is None else residual.double()
    )
    if linear.bits == 16:
        out = row_linear(x, linear, norm, residual, tile=tile)
    else:
        norm = (gain.float(), 1e-5) if normed else None
        out = row_linear(x.float(), linear, norm, residual, dtype=dtype, tile=tile)
        torch.testing.assert_close(dequantize(linear, torch.float32), linear.dequantize(torch.float32), **CLOSE)
    assert out.dtype == dtype
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < max(TOLERANCE[dtype], OFFSET_ERROR[bits]), f"relative error {error}"
    return error
