"""Tokenized samples in memory-mapped files, so that memory does not grow with the corpus and a second start is instant.

A store is a folder: for every field `NAME.values.bin`, all rows one after the other, and `NAME.ends.bin`, where each
row ends (int64); `store.json` says how many and of which type. It is written under a temporary name and renamed, so a
store that can be seen is whole.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import UserError
from clearhead.files import locked, named, write_text

CLOCK = 1_000_000_000  # nanoseconds within which a file can change without its time showing it, on any file system
VERSION = 3  # of the layout and of everything that decides what is in a store
Row = Mapping[str, Sequence[int] | Sequence[float]]


class Store:
    """Rows of named fields, read from the files as they are asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            about = json.loads((folder / "store.json").read_text(encoding="utf-8"))
            self.rows: int = about["rows"]
            self.facts: dict[str, Any] = about["facts"]
            self.fields = {
                name: tuple(self._open(f"{name}.{part}.bin", size, kind) for part, size, kind in parts)
                for name, parts in about["fields"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder} is no usable token cache ({error}); delete the folder, it is made anew"
            ) from None

    def _open(self, name: str, size: int, kind: str) -> NDArray[Any]:
        path = self.folder / name
        if path.stat().st_size != size * np.dtype(kind).itemsize:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, not {size * np.dtype(kind).itemsize}")
        # Nothing can be mapped of an empty file.
        return np.memmap(path, kind, "r", shape=(size,)) if size else np.empty(0, kind)

    def __len__(self) -> int:
        return self.rows

    def total(self, field: str) -> int:
        """How many values all rows of a field have together."""
        return len(self.fields[field][0])

    def span(self, field: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where rows begin among the values, and their lengths."""
        ends = self.fields[field][1]
        starts = np.where(rows > 0, ends[np.maximum(rows - 1, 0)], 0)
        return starts, ends[rows] - starts

    def take(self, field: str, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The values of rows, one row after the other, and the rows' lengths."""
        starts, lengths = self.span(field, rows)
        return self.fields[field][0][ranges(starts, lengths)], lengths


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, … for `length` numbers, for each of them in turn."""
    behind = lengths.cumsum()
    return np.arange(behind[-1] if len(behind) else 0) + np.repeat(starts - behind + lengths, lengths)


class Writer:
    """Rows to files, in the order they come; rows go out in blocks, so that memory stays small."""

    def __init__(self, folder: Path, kinds: Mapping[str, str]):
        self.folder, self.kinds = folder, kinds
        self.rows = 0
        self.sizes = dict.fromkeys(kinds, 0)
        self.files: dict[str, tuple[IO[bytes], IO[bytes]]] = {
            name: ((folder / f"{name}.values.bin").open("wb"), (folder / f"{name}.ends.bin").open("wb"))
            for name in kinds
        }

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows; each has every field."""
        for name, (values, ends) in self.files.items():
            lengths = np.fromiter((len(row[name]) for row in rows), np.int64, len(rows))
            kind = np.dtype(self.kinds[name])
            flat: Iterable[float] = chain.from_iterable(row[name] for row in rows)
            values.write(np.fromiter(flat, kind, int(lengths.sum())).tobytes())
            ends.write((self.sizes[name] + lengths.cumsum()).tobytes())
            self.sizes[name] += int(lengths.sum())
        self.rows += len(rows)

    def close(self, facts: Mapping[str, Any]) -> None:
        """Say what is there."""
        fields = {}
        for name, files in self.files.items():
            for file in files:
                file.close()
            fields[name] = [("values", self.sizes[name], self.kinds[name]), ("ends", self.rows, "int64")]
        about = {"version": VERSION, "rows": self.rows, "fields": fields, "facts": dict(facts)}
        (self.folder / "store.json").write_text(json.dumps(about, indent=1), encoding="utf-8")


def build(folder: Path, kinds: Mapping[str, str], fill: Callable[[Writer], Mapping[str, Any]]) -> Store:
    """The store at `folder`, made by `fill` where it is missing; two processes that want it make it once."""
    if (folder / "store.json").exists():
        return Store(folder)
    with full_disk(folder), locked(folder.with_name(folder.name + ".lock")):
        if not (folder / "store.json").exists():
            temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
            for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # by a process that was killed: we hold the lock
                shutil.rmtree(left, ignore_errors=True)
            try:
                temporary.mkdir(parents=True)
                writer = Writer(temporary, kinds)
                writer.close(fill(writer))
                for path in temporary.iterdir():  # all of it has to be on the disk before its name says that it is
                    with path.open("rb+") as file:
                        os.fsync(file.fileno())
                shutil.rmtree(folder, ignore_errors=True)  # without store.json it is somebody's remains
                temporary.replace(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return Store(folder)


def build_temporary(kinds: Mapping[str, str], fill: Callable[[Writer], Mapping[str, Any]]) -> Store:
    """A store for data that cannot be recognized again (a Python iterable); its files go when it goes."""
    folder = Path(tempfile.mkdtemp(prefix="clearhead-"))
    try:
        with full_disk(folder):
            writer = Writer(folder, kinds)
            writer.close(fill(writer))
        store = Store(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
    return store


def cache_folder(chosen: str = "") -> Path:
    """Where tokenized data is kept: as chosen, or CLEARHEAD_CACHE, or the user's cache folder."""
    if chosen or os.environ.get("CLEARHEAD_CACHE"):
        return Path(chosen or os.environ["CLEARHEAD_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "clearhead"


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """What the system says when it cannot write, for people."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = "free some space, or set data.cache_dir to a folder on another disk"
        else:
            fix = "set data.cache_dir (or CLEARHEAD_CACHE) to a folder that can be written"
        raise UserError(f"{folder}: the token cache cannot be written ({error.strerror}); {fix}") from None


def content(path: Path, memory: Path) -> str:
    """The SHA-256 of a file, remembered under `memory` by name, size and times of change, so that it is read once."""
    with named(str(path)), path.open("rb") as file:
        about = os.fstat(file.fileno())
        times = (about.st_mtime_ns, about.st_ctime_ns)  # a program can set the first back, but not the second
        seen = (os.path.realpath(path), about.st_size, *times, about.st_ino)
        note = memory / "seen" / hashlib.sha256(repr(seen).encode()).hexdigest()[:32]
        with contextlib.suppress(OSError):
            return note.read_text(encoding="ascii")
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - max(times) > CLOCK:  # else a change that is just being made might leave the times as they are
        with contextlib.suppress(UserError, OSError):  # forgetting costs time only
            write_text(note, found)
    return found


def key(*parts: Any) -> str:
    """A short name for plain data: equal data, equal name."""
    return hashlib.sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()[:32]
