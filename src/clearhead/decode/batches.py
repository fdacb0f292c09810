"""Many rows as few batches: sorted by length so that little is padding, cut by tokens, the order restored."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

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
    lengths: Sequence[int], tokens: int, rows: int, work: Callable[[list[int]], Sequence[Result]]
) -> list[Result]:
    """What `work` gives for each row, in the order of the rows; it is called with the numbers of each batch."""
    found: dict[int, Result] = {}
    for batch in batches(lengths, tokens, rows):
        found.update(zip(batch, work(batch), strict=True))
    return [found[number] for number in range(len(lengths))]
