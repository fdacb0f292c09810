"""Atomic folder writes, with a manifest of file sizes and SHA-256 that detects damage.

A folder `NAME` is written as `.NAME.tmp-XXXXXXXX`, synced, and renamed. A previous `NAME` is `.NAME.old` between the
two renames; readers that come then, or after a crash, use it. Writers take turns by a lock on the parent folder, so the
last of several to finish wins; a file system without locks on folders allows one writer at a time.
"""

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clearhead.errors import UserError
from clearhead.files import NO_LINK, check_regular, check_utf8_name, open_regular, parse_json, read_text
from clearhead.limits import MAX_JSON_BYTES

MANIFEST = "manifest.json"
NOT_IN_MANIFEST = (MANIFEST, "README.md")  # users may edit the model card


@contextmanager
def atomic_folder(folder: Path, check: Callable[[Path], None] = lambda folder: None) -> Iterator[Path]:
    """Yield a temporary folder; when the block succeeds, add its manifest, sync it and rename it to `folder`.

    `check` refuses a folder that may not be replaced, before the block and again before the renames.
    """
    check_utf8_name(folder)
    folder = folder.resolve()  # follow links: the temporary folder must be on the same file system
    temporary = _temporary_path(folder)
    used = None
    try:
        make_folder(folder.parent)
        with writers_turn(folder.parent):
            _clean_up(folder.parent, folder.name)
            check(folder)
            temporary.mkdir()
            used = _lock(temporary, wait=False)
        yield temporary
        _write_manifest(temporary)
        with writers_turn(folder.parent):
            _clean_up_old(folder)
            check(folder)
            _replace(folder, temporary)
    except OSError as error:
        failed = Path(str(error.filename or temporary))
        path = folder / failed.relative_to(temporary) if failed.is_relative_to(temporary) else failed
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}); the previous version is intact; "
            "free disk space or check the permissions, then try again"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after success, the previous version
        _unlock(used)


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
    return next((path for path in _places(folder) if path.exists()), folder)


def has_file(folder: Path, name: str) -> bool:
    """Whether a folder has a file, at every moment of its replacement and after a crash in it."""
    return any((path / name).exists() for path in _places(folder))


def _places(folder: Path) -> list[Path]:
    """Return where to look for a folder: between two looks it may have moved, so both places come more than once."""
    return [folder, _old_path(Path(os.path.realpath(folder)))] * 3  # Path.resolve raises for a link to itself


def verify(folder: Path) -> set[str]:
    """Check every file against the manifest's sizes and SHA-256; return the file names."""
    entries = _read_manifest(folder)
    for name, entry in entries.items():  # sizes first: they are free to check
        with read_errors(folder / name):
            check_regular(folder / name)
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


def recover(parent: Path) -> None:
    """Clean up after all processes that were killed while writing folders in `parent`."""
    if parent.is_dir():
        with writers_turn(parent):
            _clean_up(parent)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, synced so that they survive a power failure."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _temporary_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")


def _old_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


@contextmanager
def writers_turn(parent: Path) -> Iterator[None]:
    """Wait for the lock that every writer takes to create, rename and clean up folders in `parent`."""
    lock = _lock(parent, wait=True)
    try:
        yield
    finally:
        _unlock(lock)


def _lock(folder: Path, wait: bool) -> int | None:
    """Lock a folder and return the descriptor; None if another has it, or the file system has no such locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | NO_LINK)
    except OSError:  # gone, or not readable
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may hold the descriptor, too
        os.close(descriptor)


def _clean_up(parent: Path, name: str | None = None) -> None:
    """Clean up after killed writers of the folder `name`, or of all folders; the caller has the writers' turn."""
    pattern = "*" if name is None else glob.escape(name)
    for path in parent.glob(f".{pattern}.tmp-*"):
        if re.fullmatch(r"[0-9a-f]{8}|\d+", path.name.rpartition("-")[2]):  # earlier versions wrote their process id
            _delete_abandoned(path)
    for path in filter(Path.is_dir, parent.glob(f".{pattern}.old")):
        _clean_up_old(parent / path.name[1 : -len(".old")])


def _delete_abandoned(temporary: Path) -> None:
    """Delete a temporary folder unless its writer, which has a lock on it, still runs."""
    with suppress(OSError):  # not a folder, or gone
        if (lock := _lock(temporary, wait=False)) is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            _unlock(lock)


def _clean_up_old(folder: Path) -> None:
    """Complete or undo a replacement of `folder` whose process was killed."""
    old = _old_path(folder)
    if not old.is_dir():
        return
    if folder.exists():  # the replacement was complete
        _move_user_files(old, folder)
        _delete(old, _temporary_path(folder))
    else:
        os.replace(old, folder)


def _delete(folder: Path, temporary: Path) -> None:
    os.replace(folder, temporary)
    _sync(folder.parent)
    shutil.rmtree(temporary, ignore_errors=True)  # `recover` deletes what is left


def _replace(folder: Path, temporary: Path) -> None:
    """Rename the temporary folder to `folder`, and a previous one to the temporary name.

    If that fails, the previous one is restored.
    """
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
        os.replace(old, temporary)
        _sync(folder.parent)


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
        re.fullmatch(r"[^/\0]+", name)
        and name not in (".", "..")
        and isinstance(entry, dict)
        and entry.keys() == {"size", "sha256"}
        and isinstance(entry["size"], int)
        and isinstance(entry["sha256"], str)
        for name, entry in entries.items()
    )
    if not valid or _to_json(entries) != text:  # a manifest has no checksum, so its exact formatting is checked
        raise UserError(f"{path} is damaged (changed after it was written)")
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
    with open_regular(path) as file:
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
