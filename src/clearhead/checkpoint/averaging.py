"""The mean of several checkpoints' weights: section 6.1 averages the last five of a base model, twenty of a big one."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint import disk, folder, state
from clearhead.checkpoint.tensors import open_tensors
from clearhead.errors import UserError


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights in state or model folders, summed in fp64, in fp32 (or fp64 where they are)."""
    if not paths:
        raise ValueError("paths: none; give one folder or more")
    with ExitStack() as stack:
        models = [_opened(disk.present(path), stack) for path in paths]
        for path, model in zip(paths[1:], models[1:], strict=True):
            if differing := models[0].keys() ^ model.keys():
                raise UserError(f"{path} and {paths[0]} are of different models: only one has {min(differing)}")
        return {name: _mean(name, models, paths) for name in models[0]}


def _mean(name: str, models: Sequence[dict[str, Any]], paths: Sequence[Path]) -> Tensor:
    """One tensor at a time, so that no second copy of a model is ever in memory."""
    first = models[0][name].get_tensor(name)
    total = torch.zeros(first.shape, dtype=torch.float64)
    for path, model in zip(paths, models, strict=True):
        tensor = model[name].get_tensor(name)
        if tensor.shape != first.shape:
            raise UserError(f"{path} and {paths[0]} are of different models: {name} differs in shape")
        total += tensor
    return (total / len(models)).to(torch.promote_types(first.dtype, torch.float32))


def _opened(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Every tensor's name with the open file that holds it."""
    names = disk.verify(path)
    wanted = {state.WEIGHTS} if state.WEIGHTS in names else folder.weight_files(path, names)
    files = [stack.enter_context(open_tensors(path / name)) for name in wanted]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 (it is no mapping)
