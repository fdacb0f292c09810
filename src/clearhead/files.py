"""Reading lines from any file or stream, gzip or not, with errors that name file, line and fix; atomic writing."""

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
except ImportError:  # not on Windows: there, nothing keeps two processes from doing the same work twice
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("clearhead")
_read: WeakSet[IO[bytes]] = WeakSet()  # standard inputs that someone reads or has read


def read_text(path: Path, limit: int = 1 << 20) -> str:
    """The whole of a small UTF-8 file (settings, not corpora); refuses one of more than `limit` bytes."""
    with named(str(path)), path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{path} is larger than {limit:,} bytes, too large for a settings file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not valid UTF-8; save the file as UTF-8") from None


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: under a temporary name, synced, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # what keeps a file from being written may keep it from being removed, too
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({error.strerror}); nothing was changed") from None


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, plain or gzip (seen by its content), or of standard input for `-`, without ends."""
    name = "standard input" if str(path) == "-" else str(path)
    number = 0
    try:
        with named(name), _open(path) as file:
            for number, line in enumerate(file, start=1):
                if b"\0" in line:
                    raise UserError(
                        f"{name}, line {number}: a zero byte is no text; if the file is UTF-16, save it as UTF-8"
                    )
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise UserError(f"{name}, line {number}: not valid UTF-8; save the file as UTF-8") from None
    except (EOFError, zlib.error):
        raise UserError(f"{name}, after line {number}: the gzip data is cut off or damaged; fetch it again") from None


def read_document(path: Path) -> str:
    """The whole of a text of any length, plain or gzip, or of standard input for `-`; line ends stay as they are."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        with named(name), _open(path) as file:
            data = file.read()
    except (EOFError, zlib.error):
        raise UserError(f"{name}: the gzip data is cut off or damaged; fetch it again") from None
    if b"\0" in data:
        raise UserError(f"{name}: a zero byte is no text; if the file is UTF-16, save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}, line {line}: not valid UTF-8; save the file as UTF-8") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock, waiting for whoever has it; the system frees it even when its holder is killed."""
    with path.open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning("another process is preparing %s; waiting for it", path.with_suffix(""))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def named(name: str) -> Iterator[None]:
    """What the system says about a file that cannot be read, for people."""
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
    """The bytes of a file or of standard input, which is left open: it is not ours to close."""
    if str(path) == "-":
        yield _unpacked(_standard_input())
        return
    with path.open("rb") as file:
        yield _unpacked(file)


def _standard_input() -> IO[bytes]:
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("standard input is closed; send the text through a pipe, or name a file")
    stream = sys.stdin.buffer
    if stream in _read:
        raise UserError("standard input can be read once; name - once, or a file")
    _read.add(stream)
    return stream


def _unpacked(file: IO[bytes]) -> IO[bytes] | gzip.GzipFile:
    if isinstance(file, io.BufferedReader) and file.peek(2)[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=file)
    return file
