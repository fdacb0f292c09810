"""Named tensors and JSON on disk, as safetensors: written whole or not at all, refused with a reason when damaged."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from clearhead.errors import UserError
from clearhead.files import read_text, write_bytes

LARGEST = 1 << 30  # bytes of a vocabulary that is read at all


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a .safetensors file whole or not at all."""
    write_bytes(path, safetensors.torch.save({name: each.cpu().contiguous() for name, each in tensors.items()}))


def load_tensors(path: Path, ranks: dict[str, int]) -> dict[str, Tensor]:
    """Read a .safetensors file that holds floating-point tensors of these names and numbers of dimensions."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; check the path")
    try:
        tensors = safetensors.torch.load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is no safetensors file that can be read ({error}); fetch it again") from None
    for name, rank in ranks.items():
        found = tensors.get(name)
        if found is None or found.ndim != rank or not found.is_floating_point():
            raise UserError(f"{path}: expected a tensor {name} of {rank} dimensions; this file holds something else")
    return tensors


def load_json(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """Read a JSON object that has these keys."""
    try:
        data = json.loads(read_text(path, LARGEST))
    except (json.JSONDecodeError, RecursionError):
        raise UserError(f"{path} is not valid JSON; fetch it again") from None
    if not isinstance(data, dict) or any(key not in data for key in keys):
        raise UserError(f"{path}: expected {', '.join(keys)}; this file holds something else")
    return data
