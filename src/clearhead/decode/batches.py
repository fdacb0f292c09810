"""Many rows as few batches: sorted by length so that little is padding, cut by tokens, the order restored."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


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

    Several workers take a batch each, over the same weights and with one thread of the processor each: unlike threads
    that share every product, they never wait for each other.
    """
    cut = list(batches(lengths, tokens, rows))
    if min(workers, len(cut)) <= 1:
        results = [work(batch) for batch in cut]
    else:
        threads = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(min(workers, len(cut)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
                results = list(pool.map(work, cut))
        finally:
            torch.set_num_threads(threads)
    found: dict[int, Result] = {}
    for batch, group in zip(cut, results, strict=True):
        found.update(zip(batch, group, strict=True))
    return [found[number] for number in range(len(lengths))]
