"""Read text from files, gzip files and standard input; write files atomically."""

import gzip
import io
import logging
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from weakref import WeakSet

from clearhead.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: no lock, so two processes may do the same work twice
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("clearhead")
_used_stdin: WeakSet[IO[bytes]] = WeakSet()  # standard input streams already taken by a reader


def read_text(path: Path, limit: int = 1 << 20) -> str:
    """Read a small UTF-8 file such as a config; raise if it has more than `limit` bytes."""
    with file_errors(str(path)), path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{path}: larger than {limit:,} bytes, too large for a settings file; check the path")
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


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file (gzip is detected by content) or of standard input (`-`), without line ends."""
    name = "standard input" if str(path) == "-" else str(path)
    number = 0
    try:
        with file_errors(name), _open(path) as file:
            for number, line in enumerate(file, start=1):
                if b"\0" in line:
                    raise UserError(
                        f"{name}, line {number}: contains a zero byte; if the file is UTF-16, save it as UTF-8"
                    )
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise UserError(f"{name}, line {number}: not valid UTF-8; save the file as UTF-8") from None
    except (EOFError, zlib.error):
        raise UserError(f"{name}, after line {number}: the gzip data is truncated or damaged; fetch it again") from None


def read_document(path: Path) -> str:
    """Read a whole UTF-8 file, plain or gzip, or standard input (`-`); line ends are kept."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        with file_errors(name), _open(path) as file:
            data = file.read()
    except (EOFError, zlib.error):
        raise UserError(f"{name}: the gzip data is truncated or damaged; fetch it again") from None
    if b"\0" in data:
        raise UserError(f"{name}: contains a zero byte; if the file is UTF-16, save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}, line {line}: not valid UTF-8; save the file as UTF-8") from None


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
def _open(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Open a file, or standard input, which stays open afterwards."""
    if str(path) == "-":
        yield _decompress(_standard_input())
        return
    with path.open("rb") as file:
        yield _decompress(file)


def _standard_input() -> IO[bytes]:
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("standard input is closed; send the text through a pipe, or name a file")
    stream = sys.stdin.buffer
    if stream in _used_stdin:
        raise UserError("standard input can be read only once; pass - once, or give a file")
    _used_stdin.add(stream)
    return stream


def _decompress(file: IO[bytes]) -> IO[bytes] | gzip.GzipFile:
    if isinstance(file, io.BufferedReader) and file.peek(2)[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=file)
    return file
