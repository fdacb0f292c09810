"""The token cache: tokenized samples in memory-mapped files, so memory stays constant and a second run starts at once.

A store is a folder. Every field has `NAME.values.bin`, all rows concatenated, and `NAME.ends.bin`, the end of each row
(int64); `store.json` has dtypes and sizes. Stores are written under a temporary name and renamed.
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
from clearhead.files import file_errors, file_lock, write_text

CLOCK_RESOLUTION = 1_000_000_000  # nanoseconds; coarsest timestamps of any file system
VERSION = 4  # of the file layout, and of all code that decides a store's content
Row = Mapping[str, Sequence[int] | Sequence[float]]


class TokenStore:
    """Memory-mapped rows of named fields."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            header = json.loads((folder / "store.json").read_text(encoding="utf-8"))
            self.num_rows: int = header["rows"]
            self.stats: dict[str, Any] = header["stats"]
            self.fields = {
                name: tuple(self._open(f"{name}.{part}.bin", size, dtype) for part, size, dtype in parts)
                for name, parts in header["fields"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder} is not a usable token cache ({error}); delete the folder, the next run recreates it"
            ) from None

    def _open(self, name: str, size: int, dtype: str) -> NDArray[Any]:
        path = self.folder / name
        if path.stat().st_size != size * np.dtype(dtype).itemsize:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, not {size * np.dtype(dtype).itemsize}")
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, "r", shape=(size,)) if size else np.empty(0, dtype)

    def __len__(self) -> int:
        return self.num_rows

    def num_values(self, field: str) -> int:
        """Return the number of values in a field, over all rows."""
        return len(self.fields[field][0])

    def spans(self, field: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return starts and lengths of rows in the concatenated values."""
        ends = self.fields[field][1]
        starts = np.where(rows > 0, ends[np.maximum(rows - 1, 0)], 0)
        return starts, ends[rows] - starts

    def gather(self, field: str, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the concatenated values of rows, and the row lengths."""
        starts, lengths = self.spans(field, rows)
        return self.fields[field][0][concat_ranges(starts, lengths)], lengths


def concat_ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate arange(start, start + length) of each pair."""
    ends = lengths.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


class StoreWriter:
    """Append rows to the files of a store, in blocks."""

    def __init__(self, folder: Path, dtypes: Mapping[str, str]):
        self.folder, self.dtypes = folder, dtypes
        self.num_rows = 0
        self.sizes = dict.fromkeys(dtypes, 0)
        self.files: dict[str, tuple[IO[bytes], IO[bytes]]] = {
            name: ((folder / f"{name}.values.bin").open("wb"), (folder / f"{name}.ends.bin").open("wb"))
            for name in dtypes
        }

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows; each must have all fields."""
        for name, (values, ends) in self.files.items():
            lengths = np.fromiter((len(row[name]) for row in rows), np.int64, len(rows))
            flat: Iterable[float] = chain.from_iterable(row[name] for row in rows)
            values.write(np.fromiter(flat, np.dtype(self.dtypes[name]), int(lengths.sum())).tobytes())
            ends.write((self.sizes[name] + lengths.cumsum()).tobytes())
            self.sizes[name] += int(lengths.sum())
        self.num_rows += len(rows)

    def close(self, stats: Mapping[str, Any]) -> None:
        """Close the files and write `store.json`."""
        fields = {}
        for name, files in self.files.items():
            for file in files:
                file.close()
            fields[name] = [("values", self.sizes[name], self.dtypes[name]), ("ends", self.num_rows, "int64")]
        header = {"version": VERSION, "rows": self.num_rows, "fields": fields, "stats": dict(stats)}
        (self.folder / "store.json").write_text(json.dumps(header, indent=1), encoding="utf-8")


def build_store(
    folder: Path, dtypes: Mapping[str, str], fill: Callable[[StoreWriter], Mapping[str, Any]]
) -> TokenStore:
    """Open the store at `folder`, creating it with `fill` if missing; a lock keeps processes from doing it twice."""
    if (folder / "store.json").exists():
        return TokenStore(folder)
    with cache_write_errors(folder), file_lock(folder.with_name(folder.name + ".lock")):
        if not (folder / "store.json").exists():
            temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
            for stale in folder.parent.glob(f".{folder.name}.*.tmp"):  # of killed processes, since we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            try:
                temporary.mkdir(parents=True)
                writer = StoreWriter(temporary, dtypes)
                writer.close(fill(writer))
                for path in temporary.iterdir():  # fsync before the rename makes the store visible
                    with path.open("rb+") as file:
                        os.fsync(file.fileno())
                shutil.rmtree(folder, ignore_errors=True)  # incomplete, since it has no store.json
                temporary.replace(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return TokenStore(folder)


def build_temporary_store(dtypes: Mapping[str, str], fill: Callable[[StoreWriter], Mapping[str, Any]]) -> TokenStore:
    """Create a store for data that cannot be cached (a Python iterable); its files are deleted with the object."""
    folder = Path(tempfile.mkdtemp(prefix="clearhead-"))
    try:
        with cache_write_errors(folder):
            writer = StoreWriter(folder, dtypes)
            writer.close(fill(writer))
        store = TokenStore(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
    return store


def cache_folder(cache_dir: str = "") -> Path:
    """Return the cache folder: `cache_dir`, or CLEARHEAD_CACHE, or clearhead in the user's cache folder."""
    try:
        if cache_dir or os.environ.get("CLEARHEAD_CACHE"):
            return Path(cache_dir or os.environ["CLEARHEAD_CACHE"]).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "clearhead"
    except RuntimeError:  # a user without an entry in the system's list, as in containers
        raise UserError("the cache folder is unknown, as this user has no home; set CLEARHEAD_CACHE") from None


@contextlib.contextmanager
def cache_write_errors(folder: Path) -> Iterator[None]:
    """Turn OS errors while writing the cache into `UserError`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = "free some space, or set data.cache_dir to a folder on another disk"
        else:
            fix = "set data.cache_dir (or CLEARHEAD_CACHE) to a writable folder"
        raise UserError(f"{folder}: the token cache cannot be written ({error.strerror}); {fix}") from None


def file_digest(path: Path, cache: Path) -> str:
    """Return the SHA-256 of a file, cached under `cache` by path, size, times and inode."""
    with file_errors(str(path)), path.open("rb") as file:
        stat = os.fstat(file.fileno())
        times = (stat.st_mtime_ns, stat.st_ctime_ns)  # programs can reset mtime but not ctime
        identity = (os.path.realpath(path), stat.st_size, *times, stat.st_ino)
        entry = cache / "seen" / hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
        with contextlib.suppress(OSError):
            return entry.read_text(encoding="ascii")
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - max(times) > CLOCK_RESOLUTION:  # otherwise a later change might not alter the timestamps
        with contextlib.suppress(UserError, OSError):  # without an entry, the file is only read again
            write_text(entry, digest)
    return digest


def cache_key(*parts: Any) -> str:
    """Hash plain data and the format version to a short name."""
    return hashlib.sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()[:32]
