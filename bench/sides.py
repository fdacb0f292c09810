"""Peers that take turns, each in a process of its own: within one, libraries wait for each other's OpenMP threads."""

import multiprocessing
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self


class Turn(NamedTuple):
    """Seconds by the clock and of the processor, and what came out."""

    clock: float
    cpu: float
    result: Any


def timed(work: Callable[[], Any]) -> Turn:
    """One run of a piece of work."""
    begun, used = time.perf_counter(), time.process_time()
    result = work()
    return Turn(time.perf_counter() - begun, time.process_time() - used, result)


class Side:
    """The work that `make(*given)` gives, made and run in another process."""

    def __init__(self, make: Callable[..., Callable[[], Any]], *given: Any):
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=_serve, args=(end, make, given), daemon=True)
        self.process.start()
        end.close()

    def run(self) -> Turn:
        """Run it once, and wait for it."""
        self.pipe.send(None)
        return self.pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()


def _serve(pipe: Any, make: Callable[..., Callable[[], Any]], given: tuple[Any, ...]) -> None:
    work = make(*given)
    while True:
        pipe.recv()
        pipe.send(timed(work))
