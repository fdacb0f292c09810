"""The binary form of an answer: a JSON header, then tensors.

    bytes 0–3    length of the header, little-endian
    header       UTF-8 JSON, padded with spaces so that the tensors start at a multiple of 8
    tensors      one after the other, each padded to a multiple of 8, little-endian

The header's `tensors` lists name, dtype (uint8, float32 or int32), shape and offset from the end of the header.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 8


def frame(header: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> bytes:
    """Pack a header and named tensors; those that are None are left out."""
    entries, parts, offset = [], [], 0
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        array = _array(tensor)
        data = array.tobytes()
        entries.append({"name": name, "dtype": str(array.dtype), "shape": list(array.shape), "offset": offset})
        parts += [data, b"\0" * (-len(data) % ALIGNMENT)]
        offset += len(data) + (-len(data) % ALIGNMENT)
    text = json.dumps(finite({**header, "tensors": entries}), ensure_ascii=False, allow_nan=False).encode()
    text += b" " * (-(4 + len(text)) % ALIGNMENT)
    return b"".join([len(text).to_bytes(4, "little"), text, *parts])


def unframe(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Unpack a header and its tensors, as the page does."""
    start = 4 + int.from_bytes(data[:4], "little")
    header = json.loads(data[4:start])
    tensors = {}
    for entry in header.pop("tensors"):
        count = math.prod(entry["shape"])
        array = np.frombuffer(data, np.dtype(entry["dtype"]).newbyteorder("<"), count, start + entry["offset"])
        tensors[entry["name"]] = torch.tensor(array.astype(entry["dtype"])).reshape(entry["shape"])
    return header, tensors


def finite(value: Any) -> Any:
    """The value with null in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def _array(tensor: Tensor) -> Any:
    """A tensor as uint8 (bool too), int32 or float32, little-endian and contiguous."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bool, torch.uint8):
        return np.ascontiguousarray(tensor.byte().numpy())
    if tensor.is_floating_point():
        return np.ascontiguousarray(tensor.float().numpy().astype("<f4"))
    return np.ascontiguousarray(tensor.numpy().astype("<i4"))
