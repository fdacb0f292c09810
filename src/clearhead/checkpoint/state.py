"""Training states of a run: written whole or not at all, the newest undamaged one found again, one process at a time.

    run/checkpoints/step-00000100/   weights.safetensors  optimizer.safetensors  state.json  manifest.json

Randomness is derived from seed and step, so a state holds tensors and a few numbers, and nothing of how many
processes wrote it.
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
FOLDER, LOCK = "checkpoints", ".lock"


@dataclass(frozen=True)
class State:
    """A training state on disk, found undamaged; its tensors are read when asked for."""

    folder: Path
    step: int
    numbers: dict[str, Any]  # data position, scaler, digest of the recipe: whatever was saved

    def weights(self) -> dict[str, Tensor]:
        """The weights by name."""
        return read_tensors(self.folder / WEIGHTS)

    def optimizer(self) -> dict[str, Tensor]:
        """The optimizer's tensors by name."""
        return read_tensors(self.folder / OPTIMIZER)


def save_state(
    run: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the state after `step` steps, then delete all but the `keep` newest up to it; gives its folder.

    `numbers` is what JSON can hold; floats come back to the bit.
    """
    if keep < 1 or step < 0:
        raise ValueError(f"keep: {keep} and step: {step}; keep one or more, and count steps from 0")
    folder = run / FOLDER / f"step-{step:08}"
    with disk.written(folder) as draft:
        save_tensors(draft / WEIGHTS, weights)
        save_tensors(draft / OPTIMIZER, optimizer)
        disk.write_json(draft / STATE, {"format": FORMAT, "version": VERSION, "step": step, "numbers": dict(numbers)})
    # One that is newer was refused when this run began: it does not count, and is replaced once the run gets there.
    for old in [found for number, found in _folders(run) if number <= step][keep:]:
        discard_state(old)
    return folder


def discard_state(folder: Path) -> None:
    """Delete a state that is no longer needed, its name first."""
    try:
        disk.discard(folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be deleted ({error.strerror}); newer steps are saved; check the permissions"
        ) from None


def newest_state(run: Path) -> tuple[State | None, list[str]]:
    """The newest state that is whole, and of every newer one what is wrong with it.

    None with reasons means that there are states but not one is whole: no ground to begin anew without a word.
    """
    refused: list[str] = []
    for step, folder in _folders(run):
        try:
            return read_state(folder, step), refused
        except UserError as error:
            refused.append(str(error))
    return None, refused


def read_state(folder: Path, step: int | None = None) -> State:
    """The state in a folder, verified to the last byte."""
    names = disk.verify(folder)
    if missing := {WEIGHTS, OPTIMIZER, STATE} - names:
        raise UserError(f"{folder / min(missing)} is missing")
    data = disk.read_json(folder / STATE)
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise UserError(f"{folder / STATE} is no training state that this version reads")
    if not isinstance(data.get("step"), int) or step not in (None, data["step"]):
        raise UserError(f"{folder / STATE} is of step {data.get('step')}; someone renamed the folder")
    if not isinstance(data.get("numbers"), dict):
        raise UserError(f"{folder / STATE} holds no numbers")
    for name in (WEIGHTS, OPTIMIZER):
        with open_tensors(folder / name):
            pass  # the header is read and checked
    return State(folder, data["step"], data["numbers"])


_held: set[int] = set()  # descriptors of locks; a forked worker must not keep its parent's lock after its death


def _drop() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop)


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Train in a run folder alone, after clearing what a killed process left; a second one is refused.

    The lock is the kernel's: it ends with the process, however that ends.
    """
    descriptor = _lock(run / LOCK)
    try:
        for place in (run.resolve(), (run / FOLDER).resolve()):
            disk.recover(place)
        yield
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
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
        process = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise UserError(f"{path} cannot be locked ({error.strerror}); use a folder on another disk") from None
        raise UserError(
            f"{path.parent}: process {process or '(unknown)'} is training here; "
            "wait until it ends, stop it, or use another folder"
        ) from None
    _held.add(descriptor)
    return descriptor


def _folders(run: Path) -> list[tuple[int, Path]]:
    """The states of a run by their names, newest first."""
    found = [
        (int(name[1]), path)
        for path in (run / FOLDER).glob("step-*")
        if (name := re.fullmatch(r"step-(\d+)", path.name)) and path.is_dir()
    ]
    return sorted(found, reverse=True)
