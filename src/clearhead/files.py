"""Read text from files, gzip files and standard input; write files atomically."""

import errno
import gzip
import io
import logging
import os
import stat
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
NO_WAIT, NO_LINK = (getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW"))  # 0 on Windows
_used_stdin: WeakSet[IO[bytes]] = WeakSet()  # standard input streams already taken by a reader


def read_text(path: Path, limit: int = 1 << 20) -> str:
    """Read a small UTF-8 file such as a config; raise if it has more than `limit` bytes."""
    with file_errors(str(path)), open_regular(path) as file:
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


def read_regular_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file of a model folder, which cannot be a pipe."""
    with file_errors(str(path)):
        check_regular(path)
    return read_lines(path)


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
