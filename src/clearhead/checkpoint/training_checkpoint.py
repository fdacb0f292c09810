"""Training checkpoints of a run: written atomically, loaded from the newest undamaged one, under a lock.

    run/checkpoints/step-00000100/   weights.safetensors  optimizer.safetensors  state.json  manifest.json

Random streams are derived from seed and step, so a checkpoint has no RNG state and does not depend on the world size.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.checkpoint import disk
from clearhead.checkpoint.tensors import open_tensors, read_tensors, save_tensors
from clearhead.errors import UserError

FORMAT, VERSION = "clearhead-state", 1
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
FOLDER, LOCK_FILE = "checkpoints", ".lock"


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A verified training checkpoint; its tensors are read on request."""

    folder: Path
    step: int
    metadata: dict[str, Any]  # data position, loss scaler, digest of the recipe

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        return read_tensors(self.folder / WEIGHTS)

    def optimizer(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors by name."""
        return read_tensors(self.folder / OPTIMIZER)


def write_checkpoint(
    run: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of a step, delete all but the `keep` newest up to it, and return its folder.

    `metadata` holds JSON values; floats are restored bit-exactly.
    """
    if keep < 1 or step < 0:
        raise ValueError(f"keep: {keep}, step: {step}; keep one or more, and count steps from 0")
    folder = run / FOLDER / f"step-{step:08}"
    with disk.atomic_folder(folder) as temporary:
        save_tensors(temporary / WEIGHTS, weights)
        save_tensors(temporary / OPTIMIZER, optimizer)
        disk.write_json(
            temporary / STATE, {"format": FORMAT, "version": VERSION, "step": step, "numbers": dict(metadata)}
        )
    # A newer one was damaged when this run resumed: it is not counted, and replaced when the run reaches its step.
    for old in [path for number, path in _step_folders(run) if number <= step][keep:]:
        delete_checkpoint(old)
    return folder


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, renaming it first so that a partly deleted one is never read."""
    try:
        disk.discard(folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be deleted ({error.strerror}); newer checkpoints are intact; check the permissions"
        ) from None


def newest_checkpoint(run: Path) -> tuple[TrainingCheckpoint | None, list[str]]:
    """Return the newest undamaged checkpoint and the errors of all newer ones.

    None with errors means that every checkpoint is damaged: do not silently restart from step 0.
    """
    errors: list[str] = []
    for step, folder in _step_folders(run):
        try:
            return read_checkpoint(folder, step), errors
        except UserError as error:
            errors.append(str(error))
    return None, errors


def read_checkpoint(folder: Path, step: int | None = None) -> TrainingCheckpoint:
    """Read the checkpoint in a folder, verifying every file."""
    names = disk.verify(folder)
    if missing := {WEIGHTS, OPTIMIZER, STATE} - names:
        raise UserError(f"{folder / min(missing)} is missing")
    data = disk.read_json(folder / STATE)
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise UserError(f"{folder / STATE}: not a training checkpoint that this version of Clearhead reads")
    if not isinstance(data.get("step"), int) or step not in (None, data["step"]):
        raise UserError(f"{folder / STATE} is for step {data.get('step')}, so the folder was renamed; rename it back")
    if not isinstance(data.get("numbers"), dict):
        raise UserError(f"{folder / STATE}: numbers is missing")
    for name in (WEIGHTS, OPTIMIZER):
        with open_tensors(folder / name):
            pass  # check the header
    return TrainingCheckpoint(folder, data["step"], data["numbers"])


_lock_descriptors: set[int] = set()  # a forked worker must not keep the lock of a parent that died


def _close_locks() -> None:
    for descriptor in _lock_descriptors:
        os.close(descriptor)
    _lock_descriptors.clear()


os.register_at_fork(after_in_child=_close_locks)


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Lock a run folder for training and clean up after killed processes; a second process gets an error.

    It is a kernel lock, so it is released however the process ends.
    """
    descriptor = _lock(run / LOCK_FILE)
    try:
        for folder in (run.resolve(), (run / FOLDER).resolve()):
            disk.recover(folder)
        yield
    finally:
        if descriptor in _lock_descriptors:
            _lock_descriptors.remove(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _lock(path: Path) -> int:
    try:
        disk.make_folder(path.parent.resolve())
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); check the permissions of its folder") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise UserError(f"{path} cannot be locked ({error.strerror}); use a folder on another disk") from None
        raise UserError(
            f"{path.parent}: process {pid or '(unknown)'} is training here; "
            "wait until it ends, stop it, or use another folder"
        ) from None
    _lock_descriptors.add(descriptor)
    return descriptor


def _step_folders(run: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a run with their steps, newest first."""
    folders = [
        (int(name[1]), path)
        for path in (run / FOLDER).glob("step-*")
        if (name := re.fullmatch(r"step-(\d+)", path.name)) and path.is_dir()
    ]
    return sorted(folders, reverse=True)
