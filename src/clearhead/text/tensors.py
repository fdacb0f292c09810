"""Read and write tensors (safetensors) and JSON, atomically and validated."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from clearhead.errors import UserError
from clearhead.files import check_regular, file_errors, parse_json, read_text, write_bytes
from clearhead.limits import MAX_JSON_BYTES

JSON = "json"  # name of the tensor that holds an object


def save_tensors(path: Path, tensors: dict[str, Tensor], data: dict[str, Any] | None = None) -> None:
    """Write a .safetensors file atomically, with `data` as a tensor of JSON, so that both are always of one save."""
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    if data is not None:
        stored[JSON] = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
    write_bytes(path, safetensors.torch.save(stored))


def load_tensors(path: Path, ranks: dict[str, int]) -> dict[str, Tensor]:
    """Read a .safetensors file with floating-point tensors of these names and numbers of dimensions, as fp32."""
    with file_errors(str(path)):
        check_regular(path)
    try:
        tensors = safetensors.torch.load_file(path)
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:  # such as an unknown dtype
        raise UserError(f"{path}: cannot be read as safetensors ({error}); download or write it again") from None
    for name, rank in ranks.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.ndim != rank or not tensor.is_floating_point():
            raise UserError(f"{path}: expected a floating-point tensor {name} of {rank} dimensions; use another file")
        tensors[name] = tensor.float()
        if not bool(tensors[name].isfinite().all()):
            raise UserError(f"{path}: {name} holds NaN or infinity; train or download it again")
    return tensors


def load_with_json(path: Path, ranks: dict[str, int], earlier: Path, keys: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the tensors and the JSON object of a file; `earlier` has the object of files of earlier versions."""
    tensors = load_tensors(path, ranks)
    if JSON not in tensors:
        return tensors, load_json(earlier, keys)
    if tensors[JSON].dtype != torch.uint8 or tensors[JSON].ndim != 1:
        raise UserError(f"{path}: {JSON} is not text; train or download it again")
    return tensors, _parse_json(path, bytes(tensors[JSON].numpy()).decode("utf-8", "replace"), keys)


def load_json(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """Read a JSON object that has these keys."""
    return _parse_json(path, read_text(path, MAX_JSON_BYTES), keys)


def _parse_json(path: Path, text: str, keys: tuple[str, ...]) -> dict[str, Any]:
    try:
        data = parse_json(text)
        json.dumps(data, ensure_ascii=False).encode()  # fails for an unpaired surrogate
    except UnicodeEncodeError:
        raise UserError(f"{path}: not valid JSON (half of a surrogate pair); download or write it again") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; download or write it again") from None
    if not isinstance(data, dict) or any(key not in data for key in keys):
        raise UserError(f"{path}: expected the keys {', '.join(keys)}; use another file")
    return data


def is_list_of_strings(value: Any) -> bool:
    """Whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
