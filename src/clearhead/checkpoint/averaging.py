"""Checkpoint averaging, as in section 6.1 of the paper: the last 5 checkpoints of a base model, 20 of a big one."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint import disk, model_folder, training_checkpoint
from clearhead.checkpoint.int8_storage import PART_SUFFIXES, from_int8_storage, plain
from clearhead.checkpoint.tensors import open_tensors
from clearhead.checkpoint.version1 import migrate_name
from clearhead.errors import UserError

Readers = dict[str, Callable[[], Tensor]]  # by tensor name


def average_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of the weights in checkpoints or model folders, summed in fp64 and returned in fp32 or fp64."""
    if not paths:
        raise ValueError("paths: none; give one folder or more")
    with ExitStack() as stack:
        models = [_open_weights(disk.current_path(path), stack) for path in paths]
        for path, model in zip(paths[1:], models[1:], strict=True):
            if differing := models[0].keys() ^ model.keys():
                raise UserError(f"{path} and {paths[0]} belong to different models: only one has {min(differing)}")
        return {name: _mean(name, models, paths) for name in models[0]}


def _mean(name: str, models: Sequence[Readers], paths: Sequence[Path]) -> Tensor:
    """Average one tensor at a time, so that no second copy of a model is ever in memory."""
    first = models[0][name]()
    total = torch.zeros(first.shape, dtype=torch.float64)
    for path, model in zip(paths, models, strict=True):
        tensor = model[name]()
        if tensor.shape != first.shape:
            raise UserError(f"{path} and {paths[0]} belong to different models: {name} differs in shape")
        total += tensor
    return (total / len(models)).to(torch.promote_types(first.dtype, torch.float32))


def _open_weights(path: Path, stack: ExitStack) -> Readers:
    """Open the weight files of a folder; nothing is read until a tensor's reader is called."""
    names = disk.verify(path)
    is_checkpoint = training_checkpoint.WEIGHTS in names
    files = [training_checkpoint.WEIGHTS] if is_checkpoint else model_folder.weight_files(path, names)
    migrate = not is_checkpoint and model_folder.format_version(path) == 1
    readers: Readers = {}
    for each in files:
        file = stack.enter_context(open_tensors(path / each))
        stored = list(file.keys())
        parts = {name + suffix for name in stored for suffix in PART_SUFFIXES}
        for name in (name for name in stored if name not in parts):
            readers[migrate_name(name) if migrate else name] = partial(_read, file, name, path / each)
    return readers


def _read(file: Any, name: str, path: Path) -> Tensor:
    """Read one tensor, dequantized if it is stored in int8 or int4."""
    tensor: Tensor = file.get_tensor(name)
    if tensor.dtype not in (torch.int8, torch.uint8):
        return tensor
    parts = [name, *(name + suffix for suffix in PART_SUFFIXES)]
    stored = {each: file.get_tensor(each) for each in parts if each in file.keys()}  # noqa: SIM118
    return plain(from_int8_storage(stored, path)[name])
