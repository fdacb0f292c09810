"""Training checkpoints of a run: written atomically, loaded from the newest undamaged one, under a lock.

    run/checkpoints/step-00000100/   weights.safetensors  optimizer.safetensors  state.json  manifest.json

Random streams are derived from seed and step, so a checkpoint has no RNG state and does not depend on the world size.
"""

import fcntl
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from clearhead.checkpoint import disk
from clearhead.checkpoint.tensors import open_tensors, read_tensors, save_tensors
from clearhead.config.settings import Settings
from clearhead.errors import UserError

FORMAT, VERSION = "clearhead-state", 2
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
FOLDER, LOCK_FILE = "checkpoints", ".lock"
MAX_STATE_BYTES = 1 << 24


class _State(Settings):
    """The contents of state.json."""

    format: str
    version: int
    step: int = Field(ge=0, le=1 << 40)
    progress: dict[str, Any]  # checked by the training loop


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A verified training checkpoint; its tensors are read on request."""

    folder: Path
    step: int
    progress: dict[str, Any]  # data position, loss scaler, recipe; unchecked: it may come from someone else

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
    progress: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of a step, delete all but the `keep` newest up to it, and return its folder.

    `progress` holds JSON values; floats are restored bit-exactly.
    """
    if keep < 1 or step < 0:
        raise ValueError(f"keep: {keep}, step: {step}; keep one or more, and count steps from 0")
    folder = checkpoint_folder(run, step)
    with disk.atomic_folder(folder) as temporary:
        save_tensors(temporary / WEIGHTS, weights)
        save_tensors(temporary / OPTIMIZER, optimizer)
        disk.write_json(
            temporary / STATE, {"format": FORMAT, "version": VERSION, "step": step, "progress": dict(progress)}
        )
    # A newer one was damaged when this run resumed: it is not counted, and replaced when the run reaches its step.
    for old in [path for number, path in checkpoint_folders(run) if number <= step][keep:]:
        delete_checkpoint(old)
    return folder


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / FOLDER / f"step-{step:08}"


def checkpoint_folders(run: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a run with their steps, newest first; links are none."""
    folders = [
        (int(name[1]), path)
        for path in (run / FOLDER).glob("step-*")
        if (name := re.fullmatch(r"step-([0-9]+)", path.name)) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(folders, reverse=True)


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
    for step, folder in checkpoint_folders(run):
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
    path = folder / STATE
    if path.stat().st_size > MAX_STATE_BYTES:
        raise UserError(f"{path}: larger than {MAX_STATE_BYTES:,} bytes, so it is not a state that training wrote")
    data = disk.read_json(path)
    if data.get("format") != FORMAT:
        raise UserError(f"{path}: not the state of a training checkpoint")
    if data.get("version") != VERSION:
        raise UserError(
            f"{path}: format version {data.get('version')!r:.20}, but this Clearhead resumes only {VERSION}; "
            "resume with the Clearhead that started the run, or start again"
        )
    state = _State.build(data, where=str(path))
    if step not in (None, state.step):
        raise UserError(f"{path} is for step {state.step}, so the folder was renamed; rename it back")
    for name in (WEIGHTS, OPTIMIZER):
        with open_tensors(folder / name):
            pass  # check the header
    return TrainingCheckpoint(folder, state.step, state.progress)


_lock_descriptors: set[int] = set()  # a forked worker must not keep the lock of a parent that died


def _close_locks() -> None:
    for descriptor in _lock_descriptors:
        os.close(descriptor)
    _lock_descriptors.clear()


os.register_at_fork(after_in_child=_close_locks)


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Lock a run folder for training and clean up after killed processes; a second process gets an error.

    It is a kernel lock, so it is released however the process ends. A folder with links is refused: training would
    write and delete where they lead.
    """
    _refuse_links(run)
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


def _refuse_links(run: Path) -> None:
    """Refuse links and special files anywhere in a run folder, which itself may be a link."""
    for folder, folders, files in os.walk(run):
        for path in (Path(folder, name) for name in (*folders, *files)):
            try:
                mode = path.lstat().st_mode
            except OSError:  # deleted by a process that is training here, or not accessible to this one either
                continue
            if stat.S_ISLNK(mode):
                raise UserError(f"{path} is a link; training writes only inside its run folder, so remove the link")
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                raise UserError(f"{path} is neither a file nor a folder; remove it from the run folder")


def _lock(path: Path) -> int:
    try:
        disk.make_folder(path.parent.resolve())
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); check the permissions of its folder") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is not a regular file; remove it")
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
            f"{path.parent}: process {pid if pid.isdecimal() else '(unknown)'} is training here; "
            "wait until it ends, stop it, or use another folder"
        ) from None
    _lock_descriptors.add(descriptor)
    return descriptor
