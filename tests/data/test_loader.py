"""Loader: workers stop with it, their errors reach the caller, idle processes get batches without labels."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.data import IGNORED, Dataset
from tests.data.helpers import dataset, equal, first_batches, loader, pairs, sentences


def worker_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("clearhead-data")]


def test_closing_the_iterator_stops_the_workers() -> None:
    iterator = iter(loader(dataset("translation", pairs(200)), 100, workers=3))
    next(iterator)
    assert worker_threads()
    iterator.close()  # type: ignore[attr-defined]
    assert not worker_threads()


def test_breaking_out_of_a_loop_stops_the_workers() -> None:
    for _ in loader(dataset("translation", pairs(200)), 100, workers=3):
        break
    assert not worker_threads()


class FailingDataset(Dataset):
    """A dataset whose sixth batch raises."""

    made = 0

    def batch(self, samples: Any, epoch: int, seed: int) -> Any:
        self.made += 1
        if self.made == 6:
            raise OSError("the disk is gone")
        return super().batch(samples, epoch, seed)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_error_in_a_worker_reaches_the_caller(count: int) -> None:
    data = dataset("translation", pairs(200))
    with pytest.raises(OSError, match="the disk is gone"):
        first_batches(FailingDataset(data.task, data.stores), 50, batch_tokens=100, workers=count)
    assert not worker_threads()


def test_workers_prefetch_a_few_batches() -> None:
    data = dataset("translation", pairs(300))
    counting = FailingDataset(data.task, data.stores)
    counting.made = -1000
    iterator = iter(loader(counting, 50, workers=2))
    next(iterator)
    for _ in range(200):
        if counting.made >= -1000 + 4:
            break
        time.sleep(0.01)
    time.sleep(0.05)
    assert -1000 + 4 <= counting.made <= -1000 + 6
    iterator.close()  # type: ignore[attr-defined]


TASKS = [
    ("translation", pairs(3), {}),
    ("classification", [(line, "a") for line in sentences(3)], {"labels": ("a", "b")}),
    ("tagging", [(line.split(), ["O"] * len(line.split())) for line in sentences(3)], {"labels": ("O", "X")}),
    ("answering", [("the cat sat", "who?", "cat", 4)] * 3, {"max_length": 40, "stride": 5}),
    ("masked-language-model", [(line,) for line in sentences(3)], {"next_sentence": True}),
    ("language-model", [("a b c d",)], {"max_length": 20}),
    ("similarity", [("a", "b", 0.5)] * 3, {}),
]


@pytest.mark.parametrize(("task", "records", "settings"), TASKS)
@pytest.mark.parametrize("packed", [False, True])
def test_processes_without_samples_get_a_batch_without_labels(
    task: str, records: list[Any], settings: dict[str, Any], packed: bool
) -> None:
    data = dataset(task, records, packed=packed, **settings)
    options: dict[str, Any] = {"batch_tokens": 1, "bucket_size": 10, "workers": 0}
    (expected,) = first_batches(data, 1, **options)
    ranks = [first_batches(data, 1, rank=rank, world_size=3, **options)[0].batches[0] for rank in range(3)]
    assert equal(ranks[0], expected.batches[0])
    for idle in ranks[1:]:
        assert idle.num_tokens == 0
        assert idle.tensors.keys() == ranks[0].tensors.keys()
        for name in ("labels", "next_sentence", "first_token", "last_token"):
            if name in idle.tensors:
                assert (idle[name] == IGNORED).all()
        inputs = next(name for name in ("source", "ids", "first") if name in idle.tensors)
        assert torch.equal(idle[inputs], ranks[0][inputs])


def test_batches_move_to_a_device_unchanged() -> None:
    for packed in (False, True):
        batch = dataset("translation", pairs(5), packed=packed).batch(np.arange(5), 0, 0)
        assert equal(batch.to("cpu"), batch)
        moved = batch.to("meta")
        assert all(tensor.device.type == "meta" for tensor in moved.tensors.values())
        assert all(docs.lengths.device.type == "meta" for docs in moved.documents.values())


def test_grad_accum_splits_a_global_batch_in_order() -> None:
    data = dataset("translation", pairs(50))
    options: dict[str, Any] = {"batch_tokens": 300, "workers": 0}
    unsplit, split = first_batches(data, 3, **options), first_batches(data, 3, grad_accum=3, **options)
    for one, three in zip(unsplit, split, strict=True):
        assert len(three.batches) == 3
        lengths = [row[row >= 0].tolist() for batch in three.batches for row in batch["source_lengths"][:, None]]
        assert lengths == one.batches[0]["source_lengths"][:, None].tolist()
