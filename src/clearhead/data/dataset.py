"""Dataset: the token stores of one task, mixed by weight; maps sample ids to batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clearhead.data.batch import Batch, concat_batches
from clearhead.data.random import Permutation, hash_ints
from clearhead.data.tasks import SampleIds, Task
from clearhead.data.token_store import TokenStore


class Dataset:
    """Samples of one or more stores; ids run through the first store, then the second, and so on."""

    def __init__(self, task: Task, stores: Sequence[TokenStore], weights: Sequence[float] | None = None):
        self.task, self.stores = task, stores
        self.weights = weights or [1.0] * len(stores)

    def store_sizes(self, epoch: int) -> NDArray[np.int64]:
        """Return the number of samples in each store."""
        return np.array([self.task.num_samples(store, epoch) for store in self.stores])

    def samples_per_store(self, epoch: int) -> NDArray[np.int64]:
        """Return how many samples of each store an epoch has: store size × weight."""
        sizes = self.store_sizes(epoch)
        return np.where(sizes > 0, np.maximum(1, np.rint(sizes * np.array(self.weights))), 0).astype(np.int64)

    def num_samples(self, epoch: int) -> int:
        """Return the number of samples in an epoch."""
        return int(self.samples_per_store(epoch).sum())

    def samples_at(self, positions: SampleIds, epoch: int, seed: int, shuffle: bool) -> SampleIds:
        """Return the samples at these positions of an epoch's order, a function of (seed, epoch).

        A store whose weight is not 1 is traversed cyclically in one shuffled order, and each epoch continues where the
        previous one ended: with weight 0.5, two epochs cover the store once.
        """
        counts, sizes = self.samples_per_store(epoch), self.store_sizes(epoch)
        if shuffle:
            positions = Permutation(int(counts.sum()), seed, epoch, 0)(positions)
        if (counts == sizes).all():
            return positions
        ends = counts.cumsum()
        stores = np.searchsorted(ends, positions, side="right")
        samples = np.empty_like(positions)
        for index in np.unique(stores):
            mask = stores == index
            count, size = int(counts[index]), int(sizes[index])
            steps = (positions[mask] - (ends[index] - count) + epoch * count) % size
            samples[mask] = Permutation(size, seed, int(index), 1)(steps) + sizes[:index].sum()
        return samples

    def group_by_store(self, samples: SampleIds, epoch: int) -> SampleIds:
        """Sort the samples of a batch by store, so that any split into micro-batches gives the same tensors."""
        if len(self.stores) == 1:
            return samples
        stores = np.searchsorted(self.store_sizes(epoch).cumsum(), samples, side="right")
        return samples[np.argsort(stores, kind="stable")]

    def _by_store(self, samples: SampleIds, epoch: int) -> list[tuple[int, NDArray[np.bool_], SampleIds]]:
        """Split samples by store: (store index, mask over `samples`, ids within the store)."""
        sizes = self.store_sizes(epoch)
        ends = sizes.cumsum()
        stores = np.searchsorted(ends, samples, side="right")
        return [
            (int(index), mask := stores == index, samples[mask] - (ends[index] - sizes[index]))
            for index in np.unique(stores)
        ]

    def lengths(self, samples: SampleIds, epoch: int) -> NDArray[np.int64]:
        """Return the number of tokens of each side of each sample: (B, sides)."""
        parts = [
            (mask, self.task.lengths(self.stores[index], local_ids, epoch))
            for index, mask, local_ids in self._by_store(samples, epoch)
        ]
        if len(parts) == 1:
            return parts[0][1]
        result = np.empty((len(samples), parts[0][1].shape[1]), np.int64)
        for mask, lengths in parts:
            result[mask] = lengths
        return result

    def batch(self, samples: SampleIds, epoch: int, seed: int) -> Batch:
        """Return the samples as tensors, ordered by store."""
        return concat_batches(
            [
                self.task.batch(self.stores[index], local_ids, epoch, int(hash_ints(seed, index)))
                for index, _, local_ids in self._by_store(samples, epoch)
            ],
            self.task.pad_values,
        )
