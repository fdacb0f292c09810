"""Peers in separate processes that take turns: within one process, libraries wait for each other's OpenMP threads."""

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self


class Turn(NamedTuple):
    """Wall-clock and CPU seconds of one run, and its result."""

    clock: float
    cpu: float
    result: Any


def timed(work: Callable[[], Any]) -> Turn:
    """Run a function once and time it."""
    start, cpu_start = time.perf_counter(), time.process_time()
    result = work()
    return Turn(time.perf_counter() - start, time.process_time() - cpu_start, result)


class Side:
    """A process that calls `make(*args)` once and runs the function it returns on request."""

    def __init__(self, make: Callable[..., Callable[..., Any]], *args: Any):
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=_serve, args=(end, make, args), daemon=True)
        self.process.start()
        end.close()

    def run(self, *args: Any) -> Turn:
        """Run the function once and wait for its result."""
        self.pipe.send(args)
        return self.pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()


def _serve(pipe: Any, make: Callable[..., Callable[..., Any]], args: tuple[Any, ...]) -> None:
    work = make(*args)
    while True:
        pipe.send(timed(partial(work, *pipe.recv())))
