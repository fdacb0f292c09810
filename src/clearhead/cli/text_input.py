"""Texts to work on, as they come: those given, or lines of a file, of a pipe that may be slow, or of a terminal."""

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
CHUNK = 512  # lines that are sorted by length and worked on together, at the most
GRACE = 0.01  # seconds that the first line of a chunk waits for others: one who writes without a pause fills it


def each_text(
    texts: list[str] | None, file: Path | None, work: Callable[[list[str]], Sequence[A]]
) -> Iterator[tuple[str, A]]:
    """Every text with what `work` found: those given, or lines of a file or of stdin; an error comes in its turn."""
    if texts and file is not None:
        raise UserError("--file: given together with texts; leave one of them out")
    where = "text " if texts else f"{'standard input' if file in (None, Path('-')) else file}, line "
    number = 0
    for chunk in [texts] if texts else chunks(file or Path("-")):
        found, problem = _until_wrong(chunk, work)
        yield from zip(chunk, found, strict=problem is None)
        sys.stdout.flush()
        number += len(found)
        if problem is not None:
            raise UserError(f"{where}{number + 1}: {problem}")


def _until_wrong(chunk: list[str], work: Callable[[list[str]], Sequence[A]]) -> tuple[Sequence[A], str | None]:
    """What `work` finds for the texts before the first wrong one, and what is wrong with that."""
    from clearhead.predict.encode_batch import InvalidText

    problem = None
    while chunk:
        try:
            return work(chunk), problem
        except InvalidText as error:  # there may be another before it
            chunk = chunk[: error.number]
            problem = error.problem + (" with --cut" if error.problem.endswith("let it be cut") else "")
    return [], problem


def chunks(path: Path) -> Iterator[list[str]]:
    """Lines of a file, or of standard input for `-`: as many as are there, where it is a pipe; at least one."""
    queue, regular = _queue(path), _is_regular(path)
    found: str | Exception | None = ""
    while isinstance(found, str):
        chunk: list[str] = []
        found, latest = queue.get(), monotonic() + GRACE
        while isinstance(found, str):
            chunk.append(found)
            if len(chunk) == CHUNK:
                break
            try:
                found = queue.get(timeout=None if regular else max(0.0, latest - monotonic()))
            except Empty:
                break
        if chunk:
            yield chunk
    if found is not None:
        raise found


def waiting(path: Path) -> Iterator[str | None]:
    """The same, line by line; None where the next one is not there yet."""
    queue, patience = _queue(path), None if _is_regular(path) else GRACE / 5
    while True:
        try:
            found = queue.get(timeout=patience)
        except Empty:
            yield None
            continue
        if not isinstance(found, str):
            break
        yield found
    if found is not None:
        raise found


def _queue(path: Path) -> "Queue[str | Exception | None]":
    queue: Queue[str | Exception | None] = Queue(CHUNK)
    Thread(target=_read, args=(path, queue, sys.stdin), daemon=True).start()
    return queue


def _read(path: Path, queue: "Queue[str | Exception | None]", stdin: object) -> None:
    """Lines as they come, then the error that ended them, or None; a full queue is waited for.

    `stdin` is only held: Python ends with an abort if it has to close a stream in which this thread still waits.
    """
    from clearhead.files import read_lines

    try:
        for line in read_lines(path):
            queue.put(line)
        queue.put(None)
    except Exception as error:
        queue.put(error)


def _is_regular(path: Path) -> bool:
    """Whether all lines are there already: then every chunk is full, and the same at every run."""
    try:
        return stat.S_ISREG(os.stat(0 if str(path) == "-" else path).st_mode)
    except OSError:  # whoever reads it says why
        return False
