"""Reading binary files that nobody vouches for: every length is checked against the file before anything is made."""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.errors import UserError
from clearhead.files import named

LONGEST = 1 << 20  # items of a list in a header; the largest vocabularies have a quarter of it


class Reader:
    """A place in the bytes of a file."""

    def __init__(self, data: mmap.mmap | bytes, path: Path):
        self.data, self.path, self.at, self.size = data, path, 0, len(data)

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Numbers in the notation of `struct`, little-endian."""
        form = f"<{form}"
        start = self._pass(struct.calcsize(form))
        return struct.unpack_from(form, self.data, start)

    def number(self, form: str) -> Any:
        """One number."""
        return self.numbers(form)[0]

    def text(self, length: int) -> str:
        """UTF-8 of so many bytes."""
        start = self._pass(length)
        try:
            return bytes(self.data[start : start + length]).decode()
        except UnicodeDecodeError:
            raise self.wrong(f"byte {start:,}: a text that is not UTF-8") from None

    def array(self, dtype: str, count: int) -> "np.ndarray[Any, Any]":
        """So many numbers, as a view of the file."""
        start = self._pass(count * np.dtype(dtype).itemsize)
        return np.frombuffer(self.data, dtype, count, start)

    def room_for(self, count: int, least: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold, at `least` so many bytes each."""
        if count > LONGEST or count * least > self.size - self.at:
            raise self.wrong(f"it claims {count:,} {what}, more than it can hold")

    def wrong(self, what: str) -> UserError:
        """An error that names the file."""
        return UserError(f"{self.path} is damaged, or no file of this kind ({what})")

    def _pass(self, count: int) -> int:
        if not 0 <= count <= self.size - self.at:
            raise self.wrong(f"byte {self.at:,}: {count:,} bytes are due, {self.size - self.at:,} are left")
        self.at += count
        return self.at - count


@contextmanager
def opened(path: Path) -> Iterator[Reader]:
    """A file, mapped into memory and read as it is touched."""
    with named(str(path)), path.open("rb") as file:
        if not path.stat().st_size:
            raise UserError(f"{path} is empty")
        yield Reader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path)
