"""Which samples make up which batch. The order depends on (seed, epoch) alone, and three integers say where one is.

An epoch's samples come in shuffled order and are cut into pools. A pool is sorted by length, cut into batches of up to
`tokens` padded tokens, and its batches are shuffled. So a batch has samples of like lengths, while nothing is ever
held but one pool, and any position is reached by working out its pool.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.data.dataset import Dataset
from clearhead.data.random import Permutation
from clearhead.data.tasks import Samples
from clearhead.errors import UserError


class Position(NamedTuple):
    """The next batch: everything a resumed run needs to know about the data."""

    epoch: int = 0
    pool: int = 0
    batch: int = 0


START = Position()


class BatchPlan(NamedTuple):
    """The samples of one global batch, and where to go on after it."""

    samples: Samples
    epoch: int
    after: Position


def batch_plans(
    dataset: Dataset, tokens: int, seed: int, *, pool: int, shuffle: bool, position: Position = START
) -> Iterator[BatchPlan]:
    """Global batches from a position on: endless when shuffled, else one epoch in order."""
    epoch, number, batch = position
    while True:
        size = dataset.size(epoch)
        if not size:
            raise UserError("the data has no samples; every one was left out, or the files hold none")
        rows = max(1, tokens // int(dataset.lengths(np.zeros(1, np.int64), epoch).sum())) if dataset.task.uniform else 0
        pool_size = rows * max(1, pool // rows) if rows else pool
        if shuffle and rows and size > rows:
            size -= size % rows  # windows begin elsewhere in the next epoch, so that nothing is left out for good
        pools = -(-size // pool_size)
        while number < pools:
            places = np.arange(number * pool_size, min(size, (number + 1) * pool_size))
            samples = dataset.drawn(places, epoch, seed, shuffle)
            if rows:
                found = [samples[start : start + rows] for start in range(0, len(samples), rows)]
            else:
                found = _batches(samples, dataset.lengths(samples, epoch), tokens)
                if shuffle:
                    found = [found[n] for n in Permutation(len(found), seed, epoch, number, 2)(np.arange(len(found)))]
            while batch < len(found):
                if batch + 1 < len(found):
                    after = Position(epoch, number, batch + 1)
                else:
                    after = Position(epoch, number + 1, 0) if number + 1 < pools else Position(epoch + 1, 0, 0)
                yield BatchPlan(dataset.grouped(found[batch], epoch), epoch, after)
                batch += 1
            number, batch = number + 1, 0
        if not shuffle:
            return
        epoch, number = epoch + 1, 0


def _batches(samples: Samples, lengths: NDArray[np.int64], tokens: int) -> list[Samples]:
    """Samples sorted by length and cut where one more would make the padded batch larger than `tokens`."""
    # Within one length of the first side, the second goes up and down in turn, so that neighbors stay alike.
    keys = [lengths[:, 0]]
    for side in lengths.T[1:]:
        keys.append(np.where(keys[0] % 2 == 0, side, -side))
    order = np.lexsort(keys[::-1])
    sizes = lengths[order].tolist()
    cuts, max_length, start = [0], [0] * lengths.shape[1], 0
    for place, sample in enumerate(sizes):
        wider = [max(a, b) for a, b in zip(max_length, sample, strict=True)]
        if place > start and (place + 1 - start) * sum(wider) > tokens:
            cuts.append(place)
            start, wider = place, sample
        max_length = wider
    return [samples[order[a:b]] for a, b in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
