"""The token cache: tokenized samples in memory-mapped files, so memory stays constant and a second run starts at once.

A store is a folder. Every field has `NAME.values.bin`, all rows concatenated, and `NAME.ends.bin`, the end of each row
(int64); `store.json` has sizes and the SHA-256 of every block. Stores are written under a temporary name and renamed.

Opening a store checks it: the fields and dtypes are those that the task asks for, rows are in order, and every block is
as it was written. Of a file of more than `CHECKED_BLOCKS` blocks whose time of modification is also as written, only
as many blocks are read: the first, the last, and a choice that the digest of `store.json` determines.
"""

import contextlib
import errno
import hashlib
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field as Setting

from clearhead.config.settings import Settings
from clearhead.errors import UserError
from clearhead.files import file_errors, file_lock, open_regular, read_text, write_text

CLOCK_RESOLUTION = 1_000_000_000  # nanoseconds; coarsest timestamps of any file system
TRUNCATED = "truncated"  # counted with the reasons why records are dropped: rows that have lost tokens
VERSION = 6  # of the file layout, and of all code that decides a store's content
HEADER, MAX_HEADER_BYTES = "store.json", 1 << 28
BLOCK, CHECKED_BLOCKS = 1 << 20, 32  # bytes of a block; blocks of a large file that are checked when it is opened
MAX_CACHED_BYTES = 1 << 28
MAX_POSITION = 1 << 62  # limit of integers that only may not be negative
ROWS_AT_ONCE = 1 << 20  # when checking the ends of rows
Row = Mapping[str, Sequence[int] | Sequence[float]]
Dropped = Mapping[str, int]  # number of records that were left out, by reason


class Field(NamedTuple):
    """What the values of a field may be."""

    dtype: str
    limit: int | None = None  # integers are in 0 … limit - 1
    ignored: int | None = None  # or have this value
    row: int | str = ""  # number of values in every row, or the field whose rows are as long; "": any
    shortest: int = 0  # values in a row, at least
    within: str = ""  # every value is a position in the row of this field
    inclusive: bool = False  # or the length of that row


Fields = Mapping[str, Field]


class _File(Settings):
    """Entry of a file in `store.json`."""

    size: int = Setting(ge=0, le=1 << 50)  # values
    modified: int = 0  # nanoseconds
    blocks: tuple[str, ...] = Setting(default=(), strict=False)  # SHA-256 of each block


class _FieldFiles(Settings):
    dtype: str
    values: _File
    ends: _File


class _Header(Settings):
    """Contents of `store.json`; `sha256` is that of all other keys."""

    version: int
    rows: int = Setting(ge=0)
    fields: dict[str, _FieldFiles]
    dropped: dict[str, int]
    sha256: str


class TokenStore:
    """Memory-mapped rows of named fields."""

    def __init__(self, folder: Path, fields: Fields):
        self.folder = folder
        try:
            header = _read_header(folder / HEADER)
            if header.version != VERSION or {name: field.dtype for name, field in header.fields.items()} != {
                name: field.dtype for name, field in fields.items()
            }:
                raise ValueError(f"{HEADER}: other fields, dtypes or version than those of this task")
            self.num_rows = header.rows
            self.truncated = header.dropped.get(TRUNCATED, 0)
            self.dropped = {why: count for why, count in header.dropped.items() if count and why != TRUNCATED}
            self.fields: dict[str, tuple[NDArray[Any], NDArray[np.int64]]] = {}
            for name, files in header.fields.items():
                if files.ends.size != header.rows:
                    raise ValueError(f"{name} has {files.ends.size} rows, not {header.rows}")
                self.fields[name] = (
                    _open_file(folder / f"{name}.values.bin", files.values, fields[name], header.sha256),
                    _open_file(folder / f"{name}.ends.bin", files.ends, Field("int64"), header.sha256),
                )
            for name, field in fields.items():
                self._check_rows(name, field)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{folder} is not a usable token cache ({error}); delete the folder, the next run recreates it"
            ) from None

    def _check_rows(self, name: str, field: Field) -> None:
        """Check the lengths of rows, and values that are positions in another field's rows."""
        values, ends = self.fields[name]
        previous = 0
        for start in range(0, self.num_rows, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, self.num_rows)
            lengths = np.diff(ends[start:stop], prepend=previous)
            first, previous = previous, int(ends[stop - 1])
            if lengths.min() < field.shortest or previous > len(values):
                raise ValueError(f"{name}.ends.bin: rows are not in order")
            expected: Any = field.row
            if isinstance(field.row, str) and field.row:
                expected = np.diff(self.fields[field.row][1][start:stop], prepend=self._end(field.row, start))
            if field.row != "" and (lengths != expected).any():
                raise ValueError(f"{name}.ends.bin: rows have another length")
            if field.within:
                other = np.diff(self.fields[field.within][1][start:stop], prepend=self._end(field.within, start))
                if (values[first:previous] >= np.repeat(other + field.inclusive, lengths)).any():
                    raise ValueError(f"{name}.values.bin: a position is outside its row")
        if previous != len(values):
            raise ValueError(f"{name}.ends.bin: rows have another length")

    def _end(self, name: str, row: int) -> int:
        """Return the end of the row before `row`."""
        return int(self.fields[name][1][row - 1]) if row else 0

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


def _read_header(path: Path) -> _Header:
    with open_regular(path, follow_links=False) as file:
        data = file.read(MAX_HEADER_BYTES)
    try:
        header = json.loads(data)
        result = _Header.build(header, HEADER)
    except UserError as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    except (ValueError, RecursionError):
        raise ValueError(f"{HEADER}: not valid JSON") from None
    if result.sha256 != _header_digest(header):
        raise ValueError(f"{HEADER}: changed since it was written")
    return result


def _header_digest(header: Mapping[str, Any]) -> str:
    content = {key: value for key, value in header.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _open_file(path: Path, entry: _File, field: Field, seed: str) -> NDArray[Any]:
    """Map a file into memory, and check its size, blocks and values."""
    dtype = np.dtype(field.dtype)
    with open_regular(path, follow_links=False) as file:
        status = os.fstat(file.fileno())
        if status.st_size != entry.size * dtype.itemsize:
            raise ValueError(f"{path.name} has {status.st_size} bytes, not {entry.size * dtype.itemsize}")
        if not entry.size:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        array = np.memmap(file, dtype, "r", shape=(entry.size,))
    count = -(-status.st_size // BLOCK)
    if len(entry.blocks) != count:
        raise ValueError(f"{HEADER}: {path.name} has {count} blocks, not {len(entry.blocks)}")
    numbers: Iterable[int] = range(count)
    if count > CHECKED_BLOCKS and status.st_mtime_ns == entry.modified:
        numbers = {0, count - 1, *random.Random(seed + path.name).sample(range(count), CHECKED_BLOCKS - 2)}
    for number in sorted(numbers):
        block = array[number * BLOCK // dtype.itemsize : (number + 1) * BLOCK // dtype.itemsize]
        if hashlib.sha256(block.data).hexdigest() != entry.blocks[number]:
            raise ValueError(f"{path.name} changed since it was written")
        if field.limit is not None and not _is_within(block, field.limit, field.ignored):
            raise ValueError(f"{path.name}: a value is not in 0 … {field.limit - 1}")
    return array


def _is_within(values: NDArray[Any], limit: int, ignored: int | None) -> bool:
    if values.min() < 0:
        values = values[values != ignored]
    return not len(values) or bool(values.min() >= 0 and values.max() < limit)


class _BlockWriter:
    """A new file that is hashed in blocks while it is written."""

    def __init__(self, path: Path):
        self.file, self.hash, self.free, self.size = path.open("xb"), hashlib.sha256(), BLOCK, 0
        self.blocks: list[str] = []

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.size += len(data)
        view = memoryview(data)
        while view:
            part, view = view[: self.free], view[self.free :]
            self.hash.update(part)
            self.free -= len(part)
            if not self.free:
                self._end_block()

    def close(self, itemsize: int) -> dict[str, Any]:
        """Close and sync the file, and return its entry in `store.json`."""
        if self.free < BLOCK:
            self._end_block()
        with self.file as file:
            file.flush()
            os.fsync(file.fileno())
            modified = os.fstat(file.fileno()).st_mtime_ns
        return {"size": self.size // itemsize, "modified": modified, "blocks": self.blocks}

    def _end_block(self) -> None:
        self.blocks.append(self.hash.hexdigest())
        self.hash, self.free = hashlib.sha256(), BLOCK


class StoreWriter:
    """Append rows to the files of a store, in blocks."""

    def __init__(self, folder: Path, fields: Fields):
        self.folder = folder
        self.dtypes = {name: np.dtype(field.dtype) for name, field in fields.items()}
        self.num_rows = 0
        self.sizes = dict.fromkeys(fields, 0)
        self.files = {
            name: (_BlockWriter(folder / f"{name}.values.bin"), _BlockWriter(folder / f"{name}.ends.bin"))
            for name in fields
        }

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows; each must have all fields."""
        for name, (values, ends) in self.files.items():
            lengths = np.fromiter((len(row[name]) for row in rows), np.int64, len(rows))
            flat: Iterable[float] = chain.from_iterable(row[name] for row in rows)
            values.write(np.fromiter(flat, self.dtypes[name], int(lengths.sum())).tobytes())
            ends.write((self.sizes[name] + lengths.cumsum()).tobytes())
            self.sizes[name] += int(lengths.sum())
        self.num_rows += len(rows)

    def close(self, dropped: Dropped) -> None:
        """Close the files and write `store.json`."""
        fields = {
            name: {
                "dtype": str(self.dtypes[name]),
                "values": values.close(self.dtypes[name].itemsize),
                "ends": ends.close(8),
            }
            for name, (values, ends) in self.files.items()
        }
        header: dict[str, Any] = {"version": VERSION, "rows": self.num_rows, "fields": fields, "dropped": dict(dropped)}
        header["sha256"] = _header_digest(header)
        write_text(self.folder / HEADER, json.dumps(header, indent=1))


def build_store(folder: Path, fields: Fields, fill: Callable[[StoreWriter], Dropped]) -> TokenStore:
    """Open the store at `folder`, creating it with `fill` if missing; a lock keeps processes from doing it twice."""
    if (folder / HEADER).exists():
        return TokenStore(folder, fields)
    with cache_write_errors(folder), file_lock(folder.with_name(folder.name + ".lock")):
        if not (folder / HEADER).exists():
            temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
            for stale in folder.parent.glob(f".{folder.name}.*.tmp"):  # of killed processes, since we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            try:
                temporary.mkdir(parents=True)
                writer = StoreWriter(temporary, fields)
                writer.close(fill(writer))
                shutil.rmtree(folder, ignore_errors=True)  # incomplete, since it has no store.json
                temporary.replace(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return TokenStore(folder, fields)


def build_temporary_store(fields: Fields, fill: Callable[[StoreWriter], Dropped]) -> TokenStore:
    """Create a store for data that cannot be cached (a Python iterable); its files are deleted while mapped."""
    folder = Path(tempfile.mkdtemp(prefix="clearhead-"))
    try:
        with cache_write_errors(folder):
            writer = StoreWriter(folder, fields)
            writer.close(fill(writer))
        return TokenStore(folder, fields)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
    with file_errors(str(path)), open_regular(path) as file:
        stat = os.fstat(file.fileno())
        times = (stat.st_mtime_ns, stat.st_ctime_ns)  # programs can reset mtime but not ctime
        identity = (os.path.realpath(path), stat.st_size, *times, stat.st_ino)
        entry = cache / "seen" / hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
        with contextlib.suppress(UserError):  # a missing or changed entry: read the file again
            if re.fullmatch("[0-9a-f]{64}", known := read_cached(entry)):
                return known
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - max(times) > CLOCK_RESOLUTION:  # otherwise a later change might not alter the timestamps
        with contextlib.suppress(UserError, OSError):  # without an entry, the file is only read again
            write_cached(entry, digest)
    return digest


def write_cached(path: Path, text: str) -> None:
    """Write a small file of the cache, with a first line that detects a change."""
    write_text(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def read_cached(path: Path) -> str:
    """Return the text written by `write_cached`."""
    digest, _, text = read_text(path, MAX_CACHED_BYTES).partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise UserError(f"{path} changed since it was written; delete it, the next run recreates it")
    return text


def cache_key(*parts: Any) -> str:
    """Hash plain data and the format version to a short name."""
    return hashlib.sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()[:32]
