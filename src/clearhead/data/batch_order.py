"""Batch order: which samples form which global batch, as a function of (seed, epoch), resumable from three integers.

The shuffled samples of an epoch are cut into buckets. Each bucket is sorted by length and cut into batches of up to
`batch_tokens` padded tokens, and its batches are shuffled. So samples of a batch have similar lengths, memory holds one
bucket at a time, and resuming recomputes only the current bucket.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.data.dataset import Dataset
from clearhead.data.random import Permutation
from clearhead.data.tasks import SampleIds
from clearhead.errors import UserError


class Position(NamedTuple):
    """Index of the next batch: the data state of a checkpoint."""

    epoch: int = 0
    bucket: int = 0
    batch: int = 0


START = Position()


class BatchPlan(NamedTuple):
    """The samples of one global batch, and the position after it."""

    samples: SampleIds
    epoch: int
    next_position: Position


def batch_plans(
    dataset: Dataset, batch_tokens: int, seed: int, *, bucket_size: int, shuffle: bool, position: Position = START
) -> Iterator[BatchPlan]:
    """Yield global batches from a position on: endless if shuffled, otherwise one epoch in order."""
    epoch, bucket, batch = position
    while True:
        size = dataset.num_samples(epoch)
        if not size:
            raise UserError(
                "data: no samples; all records were dropped or the files are empty, check the data settings"
            )
        rows = 0  # per batch, where all samples have the same length
        if dataset.task.fixed_length:
            rows = max(1, batch_tokens // int(dataset.lengths(np.zeros(1, np.int64), epoch).sum()))
        bucket_size = rows * max(1, bucket_size // rows) if rows else bucket_size
        if shuffle and rows and size > rows:
            size -= size % rows  # drop the incomplete batch; windows start elsewhere in the next epoch
        buckets = -(-size // bucket_size)
        while bucket < buckets:
            positions = np.arange(bucket * bucket_size, min(size, (bucket + 1) * bucket_size))
            samples = dataset.samples_at(positions, epoch, seed, shuffle)
            if rows:
                batches = [samples[start : start + rows] for start in range(0, len(samples), rows)]
            else:
                batches = _batches_by_length(samples, dataset.lengths(samples, epoch), batch_tokens)
                if shuffle:
                    order = Permutation(len(batches), seed, epoch, bucket, 2)(np.arange(len(batches)))
                    batches = [batches[n] for n in order]
            while batch < len(batches):
                if batch + 1 < len(batches):
                    after = Position(epoch, bucket, batch + 1)
                else:
                    after = Position(epoch, bucket + 1, 0) if bucket + 1 < buckets else Position(epoch + 1, 0, 0)
                yield BatchPlan(dataset.group_by_store(batches[batch], epoch), epoch, after)
                batch += 1
            bucket, batch = bucket + 1, 0
        if not shuffle:
            return
        epoch, bucket = epoch + 1, 0


def _batches_by_length(samples: SampleIds, lengths: NDArray[np.int64], batch_tokens: int) -> list[SampleIds]:
    """Sort samples by length and cut them into batches of at most `batch_tokens` padded tokens."""
    # Sort the second side in alternating direction, so that neighbors stay similar where the first side grows by one.
    keys = [lengths[:, 0]]
    for side in lengths.T[1:]:
        keys.append(np.where(keys[0] % 2 == 0, side, -side))
    order = np.lexsort(keys[::-1])
    sorted_lengths = lengths[order].tolist()
    cuts, max_lengths, start = [0], [0] * lengths.shape[1], 0
    for index, sample in enumerate(sorted_lengths):
        longer = [max(a, b) for a, b in zip(max_lengths, sample, strict=True)]
        if index > start and (index + 1 - start) * sum(longer) > batch_tokens:
            cuts.append(index)
            start, longer = index, sample
        max_lengths = longer
    return [samples[order[a:b]] for a, b in zip(cuts, [*cuts[1:], len(sorted_lengths)], strict=True)]
