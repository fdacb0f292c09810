"""Bounds-checked reading of untrusted binary files: every length is checked before memory is allocated."""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.errors import UserError
from clearhead.files import file_errors, open_regular

MAX_ITEMS = 1 << 20  # in a list of the header; the largest vocabularies have a quarter of it


class BinaryReader:
    """The bytes of a file with a read position."""

    def __init__(self, data: mmap.mmap | bytes, path: Path):
        self.data, self.path, self.position, self.size = data, path, 0, len(data)

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Read little-endian numbers in the notation of `struct`."""
        form = f"<{form}"
        start = self._advance(struct.calcsize(form))
        return struct.unpack_from(form, self.data, start)

    def number(self, form: str) -> Any:
        """Read one number."""
        return self.numbers(form)[0]

    def text(self, length: int) -> str:
        """Read UTF-8 text of `length` bytes."""
        start = self._advance(length)
        try:
            return bytes(self.data[start : start + length]).decode()
        except UnicodeDecodeError:
            raise self.error(f"byte {start:,}: text that is not UTF-8") from None

    def array(self, dtype: str, count: int) -> "np.ndarray[Any, Any]":
        """Read `count` numbers as a view of the file."""
        start = self._advance(count * np.dtype(dtype).itemsize)
        return np.frombuffer(self.data, dtype, count, start)

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Refuse a count that does not fit into the rest of the file at `min_bytes` per item."""
        if count > MAX_ITEMS or count * min_bytes > self.size - self.position:
            raise self.error(f"it declares {count:,} {what}, more than fit into the file")

    def error(self, reason: str) -> UserError:
        """Return an error that names the file."""
        return UserError(f"{self.path} is damaged, or not a file of this format ({reason})")

    def _advance(self, count: int) -> int:
        if not 0 <= count <= self.size - self.position:
            left = self.size - self.position
            raise self.error(f"byte {self.position:,}: {count:,} bytes expected, {left:,} left")
        self.position += count
        return self.position - count


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryReader]:
    """Open a file memory-mapped."""
    with file_errors(str(path)), open_regular(path) as file:
        if not path.stat().st_size:
            raise UserError(f"{path} is empty")
        yield BinaryReader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path)
