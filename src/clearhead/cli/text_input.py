"""Read input texts from arguments, files, pipes and terminals, and process them in chunks."""

import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import TypeVar

from clearhead.errors import UserError

A = TypeVar("A")
CHUNK_SIZE = 512  # maximum lines per chunk
CHUNK_TIMEOUT = 0.01  # seconds to wait for more lines after the first line of a chunk


def map_texts(
    texts: list[str] | None, file: Path | None, process: Callable[[list[str]], Sequence[A]]
) -> Iterator[tuple[str, A]]:
    """Yield each text with its result; the results before an invalid text come before its error."""
    if texts and file is not None:
        raise UserError("--file: given together with texts; remove one of them")
    where = "text " if texts else f"{'standard input' if file in (None, Path('-')) else file}, line "
    count = 0
    for chunk in [texts] if texts else read_chunks(file or Path("-")):
        results, problem = _process_valid(chunk, process)
        yield from zip(chunk, results, strict=problem is None)
        count += len(results)
        if problem is not None:
            raise UserError(f"{where}{count + 1}: {problem}")


def _process_valid(chunk: list[str], process: Callable[[list[str]], Sequence[A]]) -> tuple[Sequence[A], str | None]:
    """Return the results of the texts before the first invalid one, and its problem."""
    from clearhead.predict.encode_batch import InvalidText

    problem = None
    while chunk:
        try:
            return process(chunk), problem
        except InvalidText as error:
            chunk = chunk[: error.number]  # an earlier text may be invalid too
            problem = error.problem.replace("truncate=True", "--truncate")
    return [], problem


def read_chunks(path: Path) -> Iterator[list[str]]:
    """Yield chunks of lines from a file, or from standard input for `-`; a pipe yields what has arrived."""
    queue, regular = _start_reader(path), _is_regular(path)
    item: str | Exception | None = ""
    while isinstance(item, str):
        chunk: list[str] = []
        item, deadline = queue.get(), monotonic() + CHUNK_TIMEOUT
        while isinstance(item, str):
            chunk.append(item)
            if len(chunk) == CHUNK_SIZE:
                break
            try:
                item = queue.get(timeout=None if regular else max(0.0, deadline - monotonic()))
            except Empty:
                break
        if chunk:
            yield chunk
    if item is not None:
        raise item


def poll_lines(path: Path) -> Iterator[str | None]:
    """Yield lines one by one, and None while the next line has not arrived."""
    queue, timeout = _start_reader(path), None if _is_regular(path) else CHUNK_TIMEOUT / 5
    while True:
        try:
            item = queue.get(timeout=timeout)
        except Empty:
            yield None
            continue
        if not isinstance(item, str):
            break
        yield item
    if item is not None:
        raise item


def _start_reader(path: Path) -> "Queue[str | Exception | None]":
    queue: Queue[str | Exception | None] = Queue(CHUNK_SIZE)
    Thread(target=_read, args=(path, queue, sys.stdin), daemon=True).start()
    return queue


def _read(path: Path, queue: "Queue[str | Exception | None]", stdin: object) -> None:
    """Queue the lines, then the error that ended them or None.

    `stdin` keeps a reference: Python aborts if it closes a stream that this thread is still reading.
    """
    from clearhead.files import read_lines

    try:
        for line in read_lines(path):
            queue.put(line)
        queue.put(None)
    except Exception as error:
        queue.put(error)


def _is_regular(path: Path) -> bool:
    """Whether the input is a regular file, whose chunks are always full."""
    try:
        return stat.S_ISREG(os.stat(0 if str(path) == "-" else path).st_mode)
    except OSError:  # reported when the file is read
        return False
