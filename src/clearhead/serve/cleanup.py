"""What a request leaves behind is undone when it ends, wherever it was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_pending: ContextVar[list[Callable[[], None]] | None] = ContextVar("cleanup", default=None)


def at_end(function: Callable[[], None]) -> None:
    """Call a function when the current HTTP request ends: with its answer, by an error, or as its client leaves."""
    pending = _pending.get()
    if pending is not None:
        pending.append(function)


@contextmanager
def cleanup() -> Iterator[None]:
    """Run an HTTP request, then what was given to `at_end`."""
    functions: list[Callable[[], None]] = []
    token = _pending.set(functions)
    try:
        yield
    finally:
        _pending.reset(token)
        for function in functions:
            function()
