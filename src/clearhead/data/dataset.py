"""Stores of one task together, mixed by weight: how many samples an epoch has, which they are, and their batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clearhead.data.batch import Batch, together
from clearhead.data.random import Permutation, hash_ints
from clearhead.data.store import Store
from clearhead.data.tasks import Samples, Task


class Dataset:
    """Samples by number: those of the first store, then those of the second, and so on."""

    def __init__(self, task: Task, stores: Sequence[Store], weights: Sequence[float] | None = None):
        self.task, self.stores = task, stores
        self.weights = weights or [1.0] * len(stores)

    def sizes(self, epoch: int) -> NDArray[np.int64]:
        """The number of samples in each store."""
        return np.array([self.task.samples(store, epoch) for store in self.stores])

    def shares(self, epoch: int) -> NDArray[np.int64]:
        """How many samples of each store an epoch has: its size times its weight."""
        sizes = self.sizes(epoch)
        return np.where(sizes > 0, np.maximum(1, np.rint(sizes * np.array(self.weights))), 0).astype(np.int64)

    def size(self, epoch: int) -> int:
        """How many samples an epoch has."""
        return int(self.shares(epoch).sum())

    def drawn(self, places: Samples, epoch: int, seed: int, shuffle: bool) -> Samples:
        """The samples at `places` of an epoch's order, which depends on (seed, epoch) alone.

        A store of weight one half gives each epoch the half that the epoch before left out: it is walked through in
        one shuffled order, and the next epoch goes on where this one ends.
        """
        shares, sizes = self.shares(epoch), self.sizes(epoch)
        if shuffle:
            places = Permutation(int(shares.sum()), seed, epoch, 0)(places)
        if (shares == sizes).all():
            return places
        ends = shares.cumsum()
        store = np.searchsorted(ends, places, side="right")
        found = np.empty_like(places)
        for number in np.unique(store):
            here = store == number
            share, size = int(shares[number]), int(sizes[number])
            walked = (places[here] - (ends[number] - share) + epoch * share) % size
            found[here] = Permutation(size, seed, int(number), 1)(walked) + sizes[:number].sum()
        return found

    def grouped(self, samples: Samples, epoch: int) -> Samples:
        """The samples of a batch, those of the first store first, so that its parts are alike however it is cut."""
        if len(self.stores) == 1:
            return samples
        store = np.searchsorted(self.sizes(epoch).cumsum(), samples, side="right")
        return samples[np.argsort(store, kind="stable")]

    def _by_store(self, samples: Samples, epoch: int) -> list[tuple[int, NDArray[np.bool_], Samples]]:
        """The stores that samples come from, where in `samples`, and which of the store's."""
        sizes = self.sizes(epoch)
        ends = sizes.cumsum()
        store = np.searchsorted(ends, samples, side="right")
        return [
            (int(number), here := store == number, samples[here] - (ends[number] - sizes[number]))
            for number in np.unique(store)
        ]

    def lengths(self, samples: Samples, epoch: int) -> NDArray[np.int64]:
        """Tokens of every side of each sample: (B, sides)."""
        parts = [
            (here, self.task.lengths(self.stores[number], own, epoch))
            for number, here, own in self._by_store(samples, epoch)
        ]
        if len(parts) == 1:
            return parts[0][1]
        found = np.empty((len(samples), parts[0][1].shape[1]), np.int64)
        for here, lengths in parts:
            found[here] = lengths
        return found

    def batch(self, samples: Samples, epoch: int, seed: int) -> Batch:
        """The samples as tensors; of several stores, the first store's come first."""
        return together(
            [
                self.task.batch(self.stores[number], own, epoch, int(hash_ints(seed, number)))
                for number, _, own in self._by_store(samples, epoch)
            ],
            self.task.padding,
        )
