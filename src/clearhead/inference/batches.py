"""Split many sequences into batches of similar length, run them (on a CPU in several threads), restore the order."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")
MAX_DEFAULT_WORKERS = 2  # workers share the GIL, and each has a KV cache of its own
_worker = threading.local()  # `cancelled`: an event, in the threads of a pool


def length_batches(lengths: Sequence[int], max_tokens: int, max_rows: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of each batch, longest first: at most `max_tokens` including padding.

    A batch with sequence n has at most max_rows[n] sequences.

    A sequence longer than `max_tokens` is a batch by itself.
    """
    batch: list[int] = []
    most = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        most = min(most, max_rows[index])
        if batch and (len(batch) >= most or (len(batch) + 1) * lengths[batch[0]] > max_tokens):
            yield batch
            batch = []
        if not batch:
            most = max_rows[index]
        batch.append(index)
    if batch:
        yield batch


def run_in_batches(
    lengths: Sequence[int],
    max_tokens: int,
    max_rows: Sequence[int],
    run: Callable[[list[int]], Sequence[Result]],
    workers: int = 1,
) -> list[Result]:
    """Call `run` with the indices of each batch; return the results in the order of `lengths`.

    Workers are threads that share the weights and split torch's threads among them; unlike the threads inside a matmul
    they never wait for each other. 0 means two, or one for each thread if that is less.
    """
    batches, threads = list(length_batches(lengths, max_tokens, max_rows)), torch.get_num_threads()
    workers = min(workers or min(threads, MAX_DEFAULT_WORKERS), len(batches))
    if workers <= 1:
        results = [run(batch) for batch in batches]
    else:
        results = _run_in_threads(batches, run, workers, threads)
    by_index: dict[int, Result] = {}
    for batch, group in zip(batches, results, strict=True):
        by_index.update(zip(batch, group, strict=True))
    return [by_index[index] for index in range(len(lengths))]


def _run_in_threads(
    batches: list[list[int]], run: Callable[[list[int]], Sequence[Result]], workers: int, threads: int
) -> list[Sequence[Result]]:
    cancelled = threading.Event()
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")  # autocast is per thread

    def start() -> None:
        torch.set_num_threads(max(1, threads // workers))
        _worker.cancelled = cancelled

    def run_with_autocast(batch: list[int]) -> Sequence[Result]:
        with torch.autocast("cpu", dtype, enabled):
            return run(batch)

    pool = ThreadPoolExecutor(workers, initializer=start)
    try:
        return list(pool.map(run_with_autocast, batches))
    finally:
        cancelled.set()  # after an error or Ctrl-C, running batches end with their step
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def raise_if_cancelled() -> None:
    """Raise KeyboardInterrupt in a worker thread whose results are no longer needed; called at every step."""
    cancelled = getattr(_worker, "cancelled", None)
    if cancelled is not None and cancelled.is_set():
        raise KeyboardInterrupt
