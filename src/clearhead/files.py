"""Read text from files, gzip files and standard input; write files atomically."""

import errno
import gzip
import io
import json
import logging
import os
import re
import stat
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
NO_WAIT, NO_LINK = (getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW"))  # 0 on Windows
_used_stdin: WeakSet[IO[bytes]] = WeakSet()  # standard input streams already taken by a reader


def check_utf8_name(path: Path) -> None:
    """Refuse a name that is not UTF-8: safetensors cannot open such a file."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: the name is not UTF-8; choose another folder") from None


def read_text(path: Path, limit: int = MAX_SETTINGS_BYTES) -> str:
    """Read a small UTF-8 file such as a config; raise if it has more than `limit` bytes."""
    with file_errors(str(path)), open_regular(path) as file:
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
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open_locked(temporary) as file:
            try:
                file.truncate()  # a killed process may have left a part of its data
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                with suppress(OSError):  # on a read-only file system, removing fails too
                    temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); nothing was changed, check the folder and its permissions"
        ) from None


def open_regular(path: Path, follow_links: bool = True) -> io.BufferedReader:
    """Open a regular file for reading; others are refused at once, where opening a pipe would wait for a writer."""
    check_regular(path, follow_links)  # first: opening a device may have an effect
    descriptor = os.open(path, os.O_RDONLY | NO_WAIT | (0 if follow_links else NO_LINK))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UserError(_not_regular(path))


def check_regular(path: Path, follow_links: bool = True) -> None:
    """Refuse pipes, sockets and devices, and links unless `follow_links`."""
    mode = path.stat(follow_symlinks=follow_links).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise UserError(_not_regular(path))


def _not_regular(path: Path) -> str:
    return f"{path} is not a regular file (but a pipe, socket, device or link); give a file"


def read_lines(
    path: Path, max_bytes: int = MAX_LINE_BYTES, max_lines: int = sys.maxsize, errors: str = "strict"
) -> Iterator[str]:
    """Yield the lines of a UTF-8 file (gzip is detected by content) or of standard input (`-`), without line ends.

    `errors` is for bytes that are not UTF-8, as for `bytes.decode`.
    """
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
                yield line.decode("utf-8-sig" if number == 1 else "utf-8", errors).rstrip("\r\n")
    except UnicodeDecodeError:
        raise UserError(f"{name}, line {number}: not valid UTF-8; save the file as UTF-8") from None
    except (EOFError, zlib.error):
        raise UserError(f"{name}, after line {number}: the gzip data is truncated or damaged; fetch it again") from None


def read_regular_lines(path: Path, max_lines: int) -> Iterator[str]:
    """Yield the lines of a file of a model folder, which cannot be a pipe."""
    with file_errors(str(path)):
        check_regular(path)
    return read_lines(path, max_lines=max_lines)


def read_document(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> str:
    """Read a whole UTF-8 file, plain or gzip, or standard input (`-`); line ends are kept."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        with file_errors(name), _open(path) as file:
            data = file.read(max_bytes + 1)
    except (EOFError, zlib.error):
        raise UserError(f"{name}: the gzip data is truncated or damaged; fetch it again") from None
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
    with _open_locked(path, f"another process is preparing {path.with_suffix('')}; waiting for it"):
        yield


@contextmanager
def _open_locked(path: Path, waiting: str = "") -> Iterator[IO[bytes]]:
    """Open a file for writing, created if missing, with an exclusive lock; log `waiting` if another has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_WAIT | NO_LINK, 0o666)
        with os.fdopen(descriptor, "r+b") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            _lock(descriptor, waiting)
            if _is_same_file(descriptor, path):  # else its previous holder renamed or deleted it
                yield file
                return


def _lock(descriptor: int, waiting: str) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting:
            log.warning(waiting)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        pass


def _is_same_file(descriptor: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    return False


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
