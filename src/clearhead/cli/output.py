"""Everything the commands print: text of files and models never controls the terminal, and failing output ends cleanly.

On a terminal, control characters are shown escaped (`\\x1b`). In a pipe, text is passed on unchanged, and a file name
that is not UTF-8 keeps its bytes. JSON is valid in both.
"""

import codecs
import json
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from clearhead.cli.language import localized

# C0 except tab and newline, DEL, C1, bidirectional overrides and isolates, lone surrogates
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class OutputError(Exception):
    """Standard output cannot be written; the cause is an OSError."""


def echo(text: object = "", *, err: bool = False, end: str = "\n") -> None:
    """Print data to stdout, or a message to stderr, in the language of the user."""
    _write(localized(str(text)) if err else text, err, end)


def say(text: str) -> None:
    """Print a message to stdout, in the language of the user."""
    _write(localized(text), err=False, end="\n")


def _write(text: object, err: bool, end: str) -> None:
    stream = sys.stderr if err else sys.stdout
    if stream is None:  # closed when the command was started
        return
    line = f"{text}{end}"
    with _write_errors(stream, err):
        stream.write(escape(line) if _is_terminal(stream) else line)
        stream.flush()


def echo_json(value: Any, *, indent: int | None = None) -> None:
    """Print a value as JSON to stdout; NaN and infinity, which JSON does not have, are null."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    echo(json_text(value, ensure_ascii=not encoding.lower().startswith("utf"), indent=indent))


def json_text(value: Any, **options: Any) -> str:
    """Return a value as JSON that is safe for a terminal and has neither NaN nor infinity."""
    options = {"ensure_ascii": False} | options
    try:
        text = json.dumps(value, allow_nan=False, **options)
    except ValueError:
        text = json.dumps(_finite(value), **options)
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def escape(text: str) -> str:
    """Escape what would control a terminal: \\x1b, or \\u202e."""
    return UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def is_terminal(*, err: bool = False) -> bool:
    """Whether stdout or stderr is a terminal."""
    stream = sys.stderr if err else sys.stdout
    return stream is not None and _is_terminal(stream)


def _is_terminal(stream: TextIO) -> bool:
    stream = getattr(stream, "rich_proxied_file", stream)  # what rich replaces while it shows a progress bar
    return not stream.closed and stream.isatty()


class CheckedStream:
    """Stdout or stderr for a writer other than `echo`, failing in the same way."""

    def __init__(self, stream: TextIO, err: bool):
        self.stream, self.err = stream, err

    def write(self, text: str) -> int:
        """Write a text as it is."""
        with _write_errors(self.stream, self.err):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with _write_errors(self.stream, self.err):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def _write_errors(stream: TextIO, err: bool) -> Iterator[None]:
    """Raise OutputError when stdout cannot be written; drop what stderr cannot take, so that the work continues."""
    try:
        yield
    except OSError as error:
        discard(stream)
        if not err:
            raise OutputError from error


def discard(stream: TextIO | None) -> None:
    """Redirect a stream to /dev/null, so that the final flush does not fail."""
    if stream is not None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def flush() -> None:
    """Flush what others have printed; stderr may fail."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            with _write_errors(sys.stderr, err=True):
                sys.stderr.flush()
    if sys.stdout is not None:
        with _write_errors(sys.stdout, err=False):
            sys.stdout.flush()


def prepare_streams() -> None:
    """Make stdout and stderr accept any text, and send log messages, warnings and tracebacks through `echo`."""
    _open_closed_descriptors()
    codecs.register_error("clearhead", _encode_anyway)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="clearhead")
    handler = _LogHandler(logging.WARNING)
    logging.lastResort = handler  # for loggers without handlers
    logging.getLogger("py.warnings").handlers = [handler]
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: _write("".join(traceback.format_exception(*error)), err=True, end="")


def _open_closed_descriptors() -> None:
    """Open descriptors 0 to 2 if they are closed; else the next file gets one, and is printed into by libraries."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor


def _encode_anyway(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encode a byte of a file name as itself, and what the encoding does not have as a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    code = ord(error.object[error.start])
    return bytes([code - 0xDC00]) if 0xDC80 <= code <= 0xDCFF else "?", error.start + 1


class _LogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print a message to stderr."""
        echo(self.format(record), err=True)
