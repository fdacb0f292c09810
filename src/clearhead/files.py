"""Read text from files, gzip files and standard input; write files atomically."""

import gzip
import io
import json
import logging
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, cast
from weakref import WeakSet

from clearhead.errors import UserError
from clearhead.limits import (
    GZIP_ALLOWANCE,
    GZIP_RATIO,
    MAX_JSON_DEPTH,
    MAX_JSON_GROUPS,
    MAX_LINE_BYTES,
    MAX_RECORD_BYTES,
    MAX_SETTINGS_BYTES,
)

try:
    import fcntl
except ImportError:  # Windows: no lock, so two processes may do the same work twice
    fcntl = None  # type: ignore[assignment]

_brackets = re.compile(r'"(?:[^"\\]++|\\.)*+"|([\[\]{}])', re.S)  # strings, so that brackets in them do not count
log = logging.getLogger("clearhead")
_used_stdin: WeakSet[IO[bytes]] = WeakSet()  # standard input streams already taken by a reader


def read_text(path: Path, limit: int = MAX_SETTINGS_BYTES) -> str:
    """Read a small UTF-8 file such as a config; raise if it has more than `limit` bytes."""
    with file_errors(str(path)), path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{path}: larger than {limit:,} bytes, too large for this kind of file; check the path")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not valid UTF-8; save the file as UTF-8") from None


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: to a temporary name, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # on a read-only file system, removing fails too
            temporary.unlink(missing_ok=True)
        raise UserError(
            f"{path} cannot be written ({error.strerror}); nothing was changed, check the folder and its permissions"
        ) from None


def read_lines(path: Path, max_bytes: int = MAX_LINE_BYTES, max_lines: int = sys.maxsize) -> Iterator[str]:
    """Yield the lines of a UTF-8 file (gzip is detected by content) or of standard input (`-`), without line ends."""
    name = "standard input" if str(path) == "-" else str(path)
    number = 0
    try:
        with file_errors(name), _open(path) as file:
            while line := file.readline(max_bytes + 1):
                number += 1
                if len(line) > max_bytes:
                    raise UserError(f"{name}, line {number}: longer than {max_bytes:,} bytes; split it into lines")
                if number > max_lines:
                    raise UserError(f"{name}: more than {max_lines:,} lines; check that it is the right file")
                if b"\0" in line:
                    raise UserError(
                        f"{name}, line {number}: contains a zero byte; if the file is UTF-16, save it as UTF-8"
                    )
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise UserError(f"{name}, line {number}: not valid UTF-8; save the file as UTF-8") from None
    except (EOFError, zlib.error):
        raise UserError(f"{name}, after line {number}: the gzip data is cut off or damaged; fetch it again") from None


def read_document(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> str:
    """Read a whole UTF-8 file, plain or gzip, or standard input (`-`); line ends are kept."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        with file_errors(name), _open(path) as file:
            data = file.read(max_bytes + 1)
    except (EOFError, zlib.error):
        raise UserError(f"{name}: the gzip data is cut off or damaged; fetch it again") from None
    if len(data) > max_bytes:
        raise UserError(f"{name}: larger than {max_bytes:,} bytes; split it into several files")
    if b"\0" in data:
        raise UserError(f"{name}: contains a zero byte; if the file is UTF-16, save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}, line {line}: not valid UTF-8; save the file as UTF-8") from None


def parse_json(text: str) -> Any:
    """Parse JSON; raise a ValueError of one line for what is invalid, or far larger as objects than as text."""
    groups = text.count("{") + text.count("[")
    if groups > MAX_JSON_GROUPS + len(text) // 32:
        raise ValueError(f"{groups:,} objects and lists, more than JSON of this size may have")
    if groups > MAX_JSON_DEPTH and _depth(text) > MAX_JSON_DEPTH:
        raise ValueError(f"not valid JSON (nested more than {MAX_JSON_DEPTH} deep)")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError includes numbers of thousands of digits
        raise ValueError(f"not valid JSON ({error})") from None


def _depth(json_text: str) -> int:
    """Return how deep the brackets of a JSON text are nested."""
    steps = (1 if found[1] in "[{" else -1 for found in _brackets.finditer(json_text) if found[1])
    return max(accumulate(steps), default=0)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the system releases it even if the holder is killed."""
    with path.open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning("another process is preparing %s; waiting for it", path.with_suffix(""))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def file_errors(name: str) -> Iterator[None]:
    """Turn OS errors about an input file into `UserError`."""
    try:
        yield
    except IsADirectoryError:
        raise UserError(f"{name} is a folder; give a file") from None
    except FileNotFoundError:
        raise UserError(f"{name} does not exist; check the path") from None
    except gzip.BadGzipFile:
        raise UserError(f"{name}: the gzip data is damaged; fetch it again") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror}); check the path and its permissions") from None


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, or standard input, which stays open afterwards."""
    if str(path) == "-":
        yield _decompress(_standard_input(), "standard input")
        return
    with path.open("rb") as file:
        yield _decompress(file, str(path))


def _standard_input() -> IO[bytes]:
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("standard input is closed; send the text through a pipe, or name a file")
    stream = sys.stdin.buffer
    if stream in _used_stdin:
        raise UserError("standard input can be read only once; pass - once, or give a file")
    _used_stdin.add(stream)
    return stream


def _decompress(file: IO[bytes], name: str) -> IO[bytes]:
    if isinstance(file, io.BufferedReader) and file.peek(2)[:2] == b"\x1f\x8b":
        return io.BufferedReader(_LimitedGzip(file, name), 1 << 16)
    return file


class _LimitedGzip(io.RawIOBase):
    """Unpack gzip data, unless it grows as only data made for it does."""

    def __init__(self, file: IO[bytes], name: str):
        self.name, self.packed = name, _CountingReader(file)
        self.gzip = gzip.GzipFile(fileobj=cast(IO[bytes], self.packed), mode="rb")
        self.unpacked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.gzip.read1(len(buffer))
        buffer[: len(data)] = data
        self.unpacked += len(data)
        if self.unpacked > GZIP_ALLOWANCE + GZIP_RATIO * self.packed.count:
            raise UserError(f"{self.name}: the gzip data unpacks to over {GZIP_RATIO} times its size; unpack it first")
        return len(data)


class _CountingReader:
    """Count the bytes that are read from a stream."""

    def __init__(self, file: IO[bytes]):
        self.file, self.count = file, 0

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.count += len(data)
        return data
