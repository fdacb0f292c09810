"""Matrices stored in a byte for each number, with a scale for each row: half of bf16, and wide again when loaded.

N rows · K columns
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from clearhead.errors import UserError
from clearhead.ops.linear.quantized import quantize_rows

SCALE = ".scale"  # behind a matrix's name


def narrowed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices (N, K) as int8 beside their scales (N,); whatever is no matrix is small anyway, and fp32."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point():
            found[name], scale = quantize_rows(tensor.detach().float())
            found[name + SCALE] = scale[:, 0]
        else:
            found[name] = tensor.float() if tensor.is_floating_point() else tensor
    return found


def widened(tensors: Mapping[str, Tensor], where: object) -> dict[str, Tensor]:
    """What `narrowed` was made of, but for rounding; other tensors stay as they are."""
    small = [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]
    found = {name: tensor for name, tensor in tensors.items() if name.removesuffix(SCALE) not in small}
    for name in small:
        scale = tensors.get(name + SCALE)
        if scale is None or scale.shape != tensors[name].shape[:1]:
            raise UserError(f"{where}: {name} is stored in bytes, but its scales {name}{SCALE} are missing or too few")
        found[name] = tensors[name].float() * scale.float()[:, None]
    return found
