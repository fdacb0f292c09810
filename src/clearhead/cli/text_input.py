"""Read records as they arrive from files, pipes and terminals, in chunks or one by one."""

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import NamedTuple, TypeVar

A = TypeVar("A")
CHUNK_SIZE = 512  # maximum records per chunk
CHUNK_TIMEOUT = 0.01  # seconds to wait for more records after the first of a chunk


class _End(NamedTuple):
    """The end of the input, or the error that ended it."""

    error: Exception | None


def read_chunks(records: Iterable[A], path: Path) -> Iterator[list[A]]:
    """Yield chunks of records, which are read from a file, or from standard input for `-`; a pipe yields what came."""
    queue, regular = _start_reader(records), _is_regular(path)
    item: A | _End | None = None
    while not isinstance(item, _End):
        chunk: list[A] = []
        item, deadline = queue.get(), monotonic() + CHUNK_TIMEOUT
        while not isinstance(item, _End):
            chunk.append(item)
            if len(chunk) == CHUNK_SIZE:
                break
            try:
                item = queue.get(timeout=None if regular else max(0.0, deadline - monotonic()))
            except Empty:
                break
        if chunk:
            yield chunk
    if item.error is not None:
        raise item.error


def poll(records: Iterable[A], path: Path) -> Iterator[A | None]:
    """Yield records one by one, and None while the next has not arrived."""
    queue, timeout = _start_reader(records), None if _is_regular(path) else CHUNK_TIMEOUT / 5
    while True:
        try:
            item = queue.get(timeout=timeout)
        except Empty:
            yield None
            continue
        if isinstance(item, _End):
            break
        yield item
    if item.error is not None:
        raise item.error


def _start_reader(records: Iterable[A]) -> "Queue[A | _End]":
    queue: Queue[A | _End] = Queue(CHUNK_SIZE)
    Thread(target=_read, args=(records, queue, sys.stdin), daemon=True).start()
    return queue


def _read(records: Iterable[A], queue: "Queue[A | _End]", stdin: object) -> None:
    """Queue the records, then the end.

    `stdin` keeps a reference: Python aborts if it closes a stream that this thread is still reading.
    """
    try:
        for record in records:
            queue.put(record)
        queue.put(_End(None))
    except Exception as error:
        queue.put(_End(error))


def _is_regular(path: Path) -> bool:
    """Whether the input is a regular file, whose chunks are always full."""
    try:
        return stat.S_ISREG(os.stat(0 if str(path) == "-" else path).st_mode)
    except OSError:  # reported when the file is read
        return False
