"""Read and write tensors (safetensors) and JSON, atomically and validated."""

from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from clearhead.errors import UserError
from clearhead.files import parse_json, read_text, write_bytes
from clearhead.limits import MAX_JSON_BYTES


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a .safetensors file atomically."""
    write_bytes(path, safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def load_tensors(path: Path, ranks: dict[str, int]) -> dict[str, Tensor]:
    """Read a .safetensors file with floating-point tensors of these names and numbers of dimensions."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; check the path")
    try:
        tensors = safetensors.torch.load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error}); download or write it again") from None
    for name, rank in ranks.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.ndim != rank or not tensor.is_floating_point():
            raise UserError(f"{path}: expected a floating-point tensor {name} of {rank} dimensions; use another file")
    return tensors


def load_json(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """Read a JSON object that has these keys."""
    text = read_text(path, MAX_JSON_BYTES)
    try:
        data = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}; download or write it again") from None
    if not isinstance(data, dict) or any(key not in data for key in keys):
        raise UserError(f"{path}: expected the keys {', '.join(keys)}; use another file")
    return data
