"""Named tensors of a network, checks that they fit, and safetensors files."""

import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as tensors_of_bytes
from safetensors.torch import save_file
from torch import Tensor, nn

from clearhead.checkpoint.disk import named_errors, read_errors
from clearhead.errors import UserError
from clearhead.files import check_regular, open_regular

COPIED_BYTES = 64_000_000  # files up to this size are read, larger ones memory-mapped
LFS_POINTER = b"version https://git-lfs"
log = logging.getLogger("clearhead")
MAX_SHOWN = 3  # names in an error message, before "and 17 more"
FLOAT_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}  # that every op computes with


def named_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer once, by name; a tied tensor has its first name."""
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        unique.setdefault(id(tensor), (name, tensor))
    return dict(unique.values())


def stored_names(network: nn.Module) -> dict[str, str]:
    """Map every name in the network's state dict to the name that its tensor is stored under."""
    state = network.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: first_names[id(tensor)] for name, tensor in state.items()}


def check_fit(expected: Mapping[str, Tensor], given: Mapping[str, Tensor], where: object) -> None:
    """Check that names, shapes and kinds of dtype are equal; raise a one-line error if not."""
    if missing := expected.keys() - given.keys():
        raise UserError(f"{where}: {_listed(missing)} missing; these weights belong to another model")
    if unexpected := given.keys() - expected.keys():
        raise UserError(f"{where}: {_listed(unexpected)} not in the model; these weights belong to another model")
    for name, tensor in expected.items():
        if given[name].shape != tensor.shape:
            raise UserError(
                f"{where}: {name} is {_shape(given[name])}, but {_shape(tensor)} in the model; "
                "these weights belong to another model"
            )
        allowed = FLOAT_DTYPES if tensor.is_floating_point() else {tensor.dtype}
        if given[name].dtype not in allowed:
            raise UserError(f"{where}: {name} is {given[name].dtype}, but {tensor.dtype} in the model")


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file."""
    with named_errors(path):
        path.touch()
        mode = path.stat().st_mode  # safetensors ignores the umask: only the owner could read the file
        try:
            contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, path, metadata={"format": "pt"})
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
        path.chmod(mode)


@contextmanager
def open_tensors(path: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    """Open a safetensors file, with `keys()` and `get_tensor(name)`; on a CPU it is memory-mapped."""
    with read_errors(path):
        open_regular(path).close()  # safetensors reports every failure to open a file as a missing file
    try:
        file = safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error})") from None
    with file as opened:
        yield opened


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return all tensors of a safetensors file; a large one is memory-mapped on a CPU, so nobody may truncate it."""
    with read_errors(path):
        check_regular(path)
        is_small = path.stat().st_size <= COPIED_BYTES
    if is_small:
        return {name: tensor.to(device) for name, tensor in _parse(path).items()}
    with open_tensors(path, device) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def _parse(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a small safetensors file, in memory of their own."""
    with read_errors(path), open_regular(path) as file:
        data = file.read(COPIED_BYTES + 1)
    if data.startswith(LFS_POINTER):
        raise UserError(f"{path} is a pointer of Git LFS instead of the file; run `git lfs pull` in its folder")
    try:
        # Sorted, as from a mapped file: processes that gather tensors together must have them in the same order.
        return dict(sorted(tensors_of_bytes(data).items()))
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # such as a dtype that torch does not have
        raise UserError(f"{path} cannot be read as safetensors ({error})") from None


def to_one_dtype(tensors: Mapping[str, Tensor], where: object) -> dict[str, Tensor]:
    """Convert weights of mixed floating-point dtypes to the widest; refuse float8 and the like."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point() or tensor.is_complex()}
    if unknown := dtypes - FLOAT_DTYPES:
        raise UserError(f"{where}: weights of dtype {unknown.pop()} are not supported; convert them to bf16 or fp32")
    if len(dtypes) < 2:
        return dict(tensors)
    widest = functools.reduce(torch.promote_types, dtypes)
    log.warning("%s: weights of several dtypes, converted to %s", where, str(widest).removeprefix("torch."))
    return {name: tensor.to(widest) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:MAX_SHOWN])
    rest = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return f"{shown}{rest} {'is' if len(names) == 1 else 'are'}"


def _shape(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "a scalar"
