"""int8 storage of weight matrices with one scale per row, dequantized on load.   N rows · K columns"""

from collections.abc import Mapping

import torch
from torch import Tensor

from clearhead.errors import UserError
from clearhead.ops.linear.quantized import quantize_rows

SCALE_SUFFIX = ".scale"


def to_int8_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantize matrices (N, K) to int8 with scales (N,); store all other floating-point tensors as fp32."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point():
            stored[name], scale = quantize_rows(tensor.detach().float())
            stored[name + SCALE_SUFFIX] = scale[:, 0]
        else:
            stored[name] = tensor.float() if tensor.is_floating_point() else tensor
    return stored


def from_int8_storage(tensors: Mapping[str, Tensor], where: object) -> dict[str, Tensor]:
    """Dequantize int8 matrices to fp32; other tensors are unchanged."""
    quantized = {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    restored = {name: tensor for name, tensor in tensors.items() if name.removesuffix(SCALE_SUFFIX) not in quantized}
    for name in quantized:
        if tensors[name].dim() != 2:  # the scales of another shape would be broadcast to a matrix
            raise UserError(f"{where}: {name} is int8, but not a matrix; fetch or convert the model again")
        scale = tensors.get(name + SCALE_SUFFIX)
        if tensors[name].dim() != 2:
            raise UserError(f"{where}: {name} is int8, but not a matrix")
        if scale is None or scale.shape != tensors[name].shape[:1] or not scale.is_floating_point():
            raise UserError(f"{where}: {name} is int8, but its scales {name}{SCALE_SUFFIX} are missing or too few")
        restored[name] = tensors[name].float() * scale.float()[:, None]
    return restored
