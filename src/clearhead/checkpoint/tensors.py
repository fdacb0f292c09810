"""Tensors by name: out of a network and into it, to safetensors files and back, each stored once."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from clearhead.checkpoint.disk import naming, reading
from clearhead.errors import UserError

SHOWN = 3  # names in an error, before "and 17 more"


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Every weight and running statistic once, by name; what is tied stands under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def all_names(network: nn.Module) -> dict[str, str]:
    """Every name in the network's state, with the name that its tensor is stored under."""
    state = network.state_dict(keep_vars=True)
    stored = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: stored[id(tensor)] for name, tensor in state.items()}


def check_fit(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: object) -> None:
    """The same names, with the same shapes and kinds of number; else one line that says what differs."""
    if missing := expected.keys() - found.keys():
        raise UserError(f"{where}: {_listed(missing)} missing; these weights are of another model")
    if unexpected := found.keys() - expected.keys():
        raise UserError(f"{where}: {_listed(unexpected)} not in the model; these weights are of another model")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise UserError(
                f"{where}: {name} is {_shape(found[name])}, but {_shape(tensor)} in the model; "
                "these weights are of another model"
            )
        if found[name].is_floating_point() != tensor.is_floating_point():
            raise UserError(f"{where}: {name} holds {found[name].dtype}, but {tensor.dtype} in the model")


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file."""
    with naming(path):
        path.touch()
        mode = path.stat().st_mode  # safetensors would leave the file to its owner alone
        try:
            held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(held, path, metadata={"format": "pt"})
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
        path.chmod(mode)


@contextmanager
def open_tensors(path: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    """A safetensors file, opened: `keys()` and `get_tensor(name)`; on a CPU a tensor is read as it is touched."""
    with reading(path):
        path.open("rb").close()  # safetensors calls missing whatever it cannot open
    try:
        file = safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error})") from None
    with file as opened:
        yield opened


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    with open_tensors(path, device) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN])
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{shown}{rest} {'is' if len(names) == 1 else 'are'}"


def _shape(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "a single number"
