"""Many rows as few batches: sorted by length so that little is padding, cut by tokens, the order restored."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")
MOST = 2  # workers, unless somebody asks for more: they take turns at Python, and each has a cache of its own
_asked = threading.local()  # in a worker, `stop`: set once nobody waits for what it does


def batches(lengths: Sequence[int], tokens: int, rows: int) -> Iterator[list[int]]:
    """The numbers of the rows of each batch: longest first, at most so many tokens with padding, and so many rows.

    A row of more tokens than a batch holds is a batch by itself.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and (len(batch) == rows or (len(batch) + 1) * lengths[batch[0]] > tokens):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def in_batches(
    lengths: Sequence[int], tokens: int, rows: int, work: Callable[[list[int]], Sequence[Result]], workers: int = 1
) -> list[Result]:
    """What `work` gives for each row, in the order of the rows; it is called with the numbers of each batch.

    Several workers take a batch each, over the same weights and with a share of the processor's threads: unlike threads
    that share every product, they never wait for each other. With 0 there are two, or as many as have a thread.
    """
    cut, threads = list(batches(lengths, tokens, rows)), torch.get_num_threads()
    workers = min(workers or min(threads, MOST), len(cut))
    results = [work(batch) for batch in cut] if workers <= 1 else _side_by_side(cut, work, workers, threads)
    found: dict[int, Result] = {}
    for batch, group in zip(cut, results, strict=True):
        found.update(zip(batch, group, strict=True))
    return [found[number] for number in range(len(lengths))]


def _side_by_side(
    cut: list[list[int]], work: Callable[[list[int]], Sequence[Result]], workers: int, threads: int
) -> list[Sequence[Result]]:
    stop = threading.Event()
    casts, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")  # which each thread has of its own

    def begin() -> None:
        torch.set_num_threads(max(1, threads // workers))
        _asked.stop = stop

    def each(batch: list[int]) -> Sequence[Result]:
        with torch.autocast("cpu", dtype, casts):
            return work(batch)

    pool = ThreadPoolExecutor(workers, initializer=begin)
    try:
        return list(pool.map(each, cut))
    finally:
        stop.set()  # after an error or Ctrl-C: what is under way ends with its step
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def raise_if_cancelled() -> None:
    """To be asked at every step: raises in a worker for whose work nobody waits any more."""
    stop = getattr(_asked, "stop", None)
    if stop is not None and stop.is_set():
        raise KeyboardInterrupt
