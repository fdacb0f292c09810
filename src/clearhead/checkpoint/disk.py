"""Folders that appear on disk whole or not at all, with a manifest of sizes and SHA-256 by which damage is found.

A folder `NAME` is written as `.NAME.tmp-PID`, synced, and renamed. One that was there before waits as `.NAME.old`
between the two renames; a reader that comes just then, or after a crash, takes it from there.
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
from clearhead.files import read_text

MANIFEST = "manifest.json"
UNCHECKED = (MANIFEST, "README.md")  # a model card is for people, who may edit it
LARGEST = 1 << 28  # bytes of a JSON file that is read at all


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """A draft to write files into; when the block ends well, it is sealed and takes the place of `folder`."""
    folder = folder.resolve()  # behind a link, the draft must lie beside the real folder
    draft = _temporary(folder)
    try:
        make_folder(folder.parent)
        recover(folder.parent, folder.name)
        draft.mkdir()
        yield draft
        _seal(draft)
        _swap(draft, folder)
    except OSError as error:
        place = Path(str(error.filename or draft))
        where = folder / place.relative_to(draft) if place.is_relative_to(draft) else place
        raise UserError(
            f"{where} cannot be written ({error.strerror or error}); what was there before is intact; "
            "free space or check the permissions, then go on"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone already when all went well


def write_json(path: Path, data: Any) -> None:
    """Write plain data into a draft."""
    with naming(path), path.open("x", encoding="utf-8", newline="") as file:
        file.write(_rendered(data))


def write_text(path: Path, text: str) -> None:
    """Write a text into a draft."""
    with naming(path), path.open("x", encoding="utf-8", newline="") as file:
        file.write(text)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    return _parsed(path, read_text(path, LARGEST))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Say which file it was: a write to a full disk fails without a name."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say which file it was that cannot be read, and why."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def present(folder: Path) -> Path:
    """Where a folder is now: under its name or, between the two renames of its replacement, under the old one."""
    old = _old(folder.resolve())
    return old if old.is_dir() and not folder.exists() else folder


def verify(folder: Path) -> set[str]:
    """The names that the manifest lists, every file being of the size and SHA-256 it says; else what is wrong."""
    entries = _manifest(folder)
    for name, entry in entries.items():  # sizes first: they cost nothing
        with reading(folder / name):
            size = (folder / name).stat().st_size
        if size != entry["size"]:
            raise UserError(f"{folder / name} is damaged ({size:,} bytes instead of {entry['size']:,})")
    for name, entry in entries.items():
        with reading(folder / name):
            digest = _sha256(folder / name)
        if digest != entry["sha256"]:
            raise UserError(f"{folder / name} is damaged (SHA-256 differs)")
    return set(entries)


def discard(folder: Path) -> None:
    """Delete a folder: first its name, so that half of it is never taken for the whole."""
    _bury(folder, _temporary(folder))


def recover(parent: Path, name: str | None = None) -> None:
    """Clear up after processes that were killed while they wrote the folder `name` in `parent`.

    Without a name, after all that ever wrote there: only for someone who holds the lock of the place.
    """
    which = "*" if name is None else glob.escape(name)
    for path in filter(Path.is_dir, parent.glob(f".{which}.tmp-*")):
        process = path.name.rpartition("-")[2]
        if process.isdecimal() and (name is None or _is_over(int(process))):
            shutil.rmtree(path, ignore_errors=True)
    for path in filter(Path.is_dir, parent.glob(f".{which}.old")):
        target = parent / path.name[1 : -len(".old")]
        if target.exists():  # the new one had taken its place
            _carry_over(path, target)
            _bury(path, _temporary(target))
        else:
            os.replace(path, target)


def make_folder(folder: Path) -> None:
    """Make a folder, with those above it, so that it is there after a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp-{os.getpid()}")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _is_over(process: int) -> bool:
    """Whether the process that left something has ended; our own number on it is from an earlier life."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return False
    except (ProcessLookupError, OverflowError):
        return True
    return process == os.getpid()


def _swap(draft: Path, folder: Path) -> None:
    """Put the draft in the place of the folder; if that fails, the folder is back where it was."""
    old = _old(folder)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(draft, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    _sync(folder.parent)
    if old.exists():
        _carry_over(old, folder)
        _bury(old, draft)


def _bury(folder: Path, grave: Path) -> None:
    os.replace(folder, grave)
    _sync(folder.parent)
    shutil.rmtree(grave, ignore_errors=True)  # the name is free already; `recover` clears what stays


def _carry_over(old: Path, folder: Path) -> None:
    """Keep what others put beside our files: notes, plots."""
    try:
        ours = {MANIFEST, *_manifest(old)}
    except UserError:  # damaged: then we cannot tell, and only take what is never ours
        ours = {path.name for path in old.iterdir() if path.suffix in (".json", ".safetensors")}
    for path in old.iterdir():
        if path.name not in ours and not (folder / path.name).exists():
            os.replace(path, folder / path.name)


def _seal(draft: Path) -> None:
    """List every file in the manifest, and let all of it reach the disk."""
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    entries = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
        if path.parent == draft and path.name not in UNCHECKED  # only what we export has folders in it
    }
    write_json(draft / MANIFEST, entries)
    for path in (*files, draft / MANIFEST, draft):
        with naming(path):
            _sync(path)


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"{path} is missing")
    text = read_text(path, LARGEST)
    entries = _parsed(path, text)
    fits = all(
        Path(name).name == name
        and isinstance(entry, dict)
        and entry.keys() == {"size", "sha256"}
        and isinstance(entry["size"], int)
        for name, entry in entries.items()
    )
    if not fits or _rendered(entries) != text:  # to the byte: a manifest has no checksum but its own form
        raise UserError(f"{path} is damaged (not as it was written)")
    return entries


def _rendered(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2) + "\n"


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
        if re.search(r"\\u[dD]", text):
            _rendered(data).encode()  # half of a surrogate pair is no character
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged (not valid JSON)") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is damaged (no JSON object)")
    return data


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Let a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)
