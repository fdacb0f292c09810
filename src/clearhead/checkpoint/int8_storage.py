"""Quantized weight matrices on disk.   N rows · K columns · G groups of 32 columns

int8 with one fp32 scale per row is dequantized on load. int8 or int4 with scales per group, as imported from
quantized files, stays quantized in memory on a CPU (`ops/linear/quantized_tensor.py`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from clearhead.errors import UserError
from clearhead.ops.linear.packed_weight import GROUP
from clearhead.ops.linear.quantized import quantize_rows
from clearhead.ops.linear.quantized_tensor import QuantizedTensor

SCALE_SUFFIX, MINIMUM_SUFFIX = ".scale", ".minimum"
PART_SUFFIXES = (SCALE_SUFFIX, MINIMUM_SUFFIX)  # of the tensors that belong to a matrix of integers


def to_int8_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantize matrices (N, K) to int8 with scales (N,); store all other floating-point tensors as fp32."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point():
            stored[name], scale = quantize_rows(plain(tensor.detach()).float())
            stored[name + SCALE_SUFFIX] = scale[:, 0]
        else:
            stored[name] = tensor.float() if tensor.is_floating_point() else tensor
    return stored


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor that is not quantized."""
    return tensor.dequantized() if isinstance(tensor, QuantizedTensor) else tensor


def to_group_storage(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return quantized matrices as their parts, for a file; with a dtype to convert to, dequantized."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, QuantizedTensor) and dtype is None:
            stored |= {name + suffix: part for suffix, part in tensor.parts.items()}
        else:
            stored[name] = plain(tensor)
    return stored


def from_int8_storage(tensors: Mapping[str, Tensor], where: object) -> dict[str, Tensor]:
    """Undo `to_int8_storage`, dequantizing to fp32, or `to_group_storage`; other tensors are unchanged."""
    quantized = {name: tensor for name, tensor in tensors.items() if tensor.dtype in (torch.int8, torch.uint8)}
    parts = {name + suffix for name in quantized for suffix in PART_SUFFIXES}
    restored = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for name, values in quantized.items():
        bits = 8 if values.dtype == torch.int8 else 4
        if values.dim() != 2:  # the scales of another shape would be broadcast to a matrix
            raise UserError(f"{where}: {name} is int{bits}, but not a matrix; fetch or convert the model again")
        scale, minimum = (tensors.get(name + suffix) for suffix in PART_SUFFIXES)
        by_row = bits == 8 and scale is not None and scale.dim() == 1
        shape = (len(values),) if by_row else (len(values), values.shape[1] * 8 // bits // GROUP)
        expected = [scale] if bits == 8 else [scale, minimum]
        whole = by_row or not values.shape[1] * 8 // bits % GROUP
        if not whole or any(part is None or part.shape != shape or not part.is_floating_point() for part in expected):
            names = " and ".join(name + suffix for suffix in PART_SUFFIXES[: len(expected)])
            raise UserError(f"{where}: {name} is int{bits}, but its scales {names} are missing or too few")
        if by_row:
            assert scale is not None
            restored[name] = values.float() * scale.float()[:, None]
        else:
            tensor = QuantizedTensor(values, *(part for part in expected if part is not None))
            restored[name] = tensor if values.is_cpu else tensor.dequantized()
    return restored
