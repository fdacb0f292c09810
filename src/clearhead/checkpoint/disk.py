"""Atomic folder writes, with a manifest of file sizes and SHA-256 that detects damage.

A folder `NAME` is written as `.NAME.tmp-PID`, synced, and renamed. A previous `NAME` is `.NAME.old` between the two
renames; readers that come then, or after a crash, use it.
"""

import errno
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clearhead.errors import UserError
from clearhead.files import parse_json, read_text
from clearhead.limits import MAX_JSON_BYTES

MANIFEST = "manifest.json"
NOT_IN_MANIFEST = (MANIFEST, "README.md")  # users may edit the model card


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; when the block succeeds, add its manifest, sync it and rename it to `folder`."""
    folder = folder.resolve()  # follow links: the temporary folder must be on the same file system
    temporary = _temporary_path(folder)
    try:
        make_folder(folder.parent)
        recover(folder.parent, folder.name)
        temporary.mkdir()
        yield temporary
        _write_manifest(temporary)
        _replace(folder, temporary)
    except OSError as error:
        failed = Path(str(error.filename or temporary))
        path = folder / failed.relative_to(temporary) if failed.is_relative_to(temporary) else failed
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}); the previous version is intact; "
            "free disk space or check the permissions, then try again"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # no longer there after success


def write_json(path: Path, data: Any) -> None:
    """Write a new JSON file."""
    with named_errors(path), path.open("x", encoding="utf-8", newline="") as file:
        file.write(_to_json(data))


def write_text(path: Path, text: str) -> None:
    """Write a new text file."""
    with named_errors(path), path.open("x", encoding="utf-8", newline="") as file:
        file.write(text)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    return _parse_json(path, read_text(path, MAX_JSON_BYTES))


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Set the file name of an OSError: a write to a full disk fails without one."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while reading into a UserError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def current_path(folder: Path) -> Path:
    """Return where a folder is now: `.NAME.old` between the two renames of its replacement."""
    old = _old_path(folder.resolve())
    return old if old.is_dir() and not folder.exists() else folder


def verify(folder: Path) -> set[str]:
    """Check every file against the manifest's sizes and SHA-256; return the file names."""
    entries = _read_manifest(folder)
    for name, entry in entries.items():  # sizes first: they are free to check
        with read_errors(folder / name):
            size = (folder / name).stat().st_size
        if size != entry["size"]:
            raise UserError(f"{folder / name} is damaged ({size:,} bytes instead of {entry['size']:,})")
    for name, entry in entries.items():
        with read_errors(folder / name):
            digest = _sha256(folder / name)
        if digest != entry["sha256"]:
            raise UserError(f"{folder / name} is damaged (SHA-256 differs)")
    return set(entries)


def discard(folder: Path) -> None:
    """Delete a folder, renaming it first so that a partly deleted one is never read."""
    _delete(folder, _temporary_path(folder))


def recover(parent: Path, name: str | None = None) -> None:
    """Clean up after processes that were killed while writing the folder `name` in `parent`.

    Without a name, clean up after every writer: the caller must hold the lock of `parent`.
    """
    pattern = "*" if name is None else glob.escape(name)
    for path in filter(Path.is_dir, parent.glob(f".{pattern}.tmp-*")):
        pid = path.name.rpartition("-")[2]
        if pid.isdecimal() and (name is None or _has_ended(int(pid))):
            shutil.rmtree(path, ignore_errors=True)
    for path in filter(Path.is_dir, parent.glob(f".{pattern}.old")):
        target = parent / path.name[1 : -len(".old")]
        if target.exists():  # the replacement was complete
            _move_user_files(path, target)
            _delete(path, _temporary_path(target))
        else:
            os.replace(path, target)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, synced so that they survive a power failure."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _temporary_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp-{os.getpid()}")


def _old_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _has_ended(pid: int) -> bool:
    """Whether the process that wrote a temporary folder has ended; our own pid is from an earlier process."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except (ProcessLookupError, OverflowError):
        return True
    return pid == os.getpid()


def _replace(folder: Path, temporary: Path) -> None:
    """Rename the temporary folder to `folder`; if that fails, restore the previous one."""
    old = _old_path(folder)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(temporary, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    _sync(folder.parent)
    if old.exists():
        _move_user_files(old, folder)
        _delete(old, temporary)


def _delete(folder: Path, temporary: Path) -> None:
    os.replace(folder, temporary)
    _sync(folder.parent)
    shutil.rmtree(temporary, ignore_errors=True)  # `recover` deletes what is left


def _move_user_files(old: Path, folder: Path) -> None:
    """Keep files that users added: notes, plots."""
    try:
        ours = {MANIFEST, *_read_manifest(old)}
    except UserError:  # damaged manifest: keep only files of types that we never write
        ours = {path.name for path in old.iterdir() if path.suffix in (".json", ".safetensors")}
    for path in old.iterdir():
        if path.name not in ours and not (folder / path.name).exists():
            os.replace(path, folder / path.name)


def _write_manifest(folder: Path) -> None:
    """List every file in the manifest, and sync all of them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
        if path.parent == folder and path.name not in NOT_IN_MANIFEST  # only exported folders have subfolders
    }
    write_json(folder / MANIFEST, entries)
    for path in (*files, folder / MANIFEST, folder):
        with named_errors(path):
            _sync(path)


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"{path} is missing")
    text = read_text(path, MAX_JSON_BYTES)
    entries = _parse_json(path, text)
    valid = all(
        Path(name).name == name
        and isinstance(entry, dict)
        and entry.keys() == {"size", "sha256"}
        and isinstance(entry["size"], int)
        for name, entry in entries.items()
    )
    if not valid or _to_json(entries) != text:  # a manifest has no checksum, so its exact formatting is checked
        raise UserError(f"{path} is damaged (not as it was written)")
    return entries


def _to_json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2) + "\n"


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    try:
        data = parse_json(text)
        if re.search(r"\\u[dD]", text):
            json.dumps(data, ensure_ascii=False).encode()  # fails for an unpaired surrogate
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is damaged (not a JSON object)")
    return data


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)
