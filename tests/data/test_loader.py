"""The loader: workers end with it, their errors reach the caller, idle processes get batches that count for nothing."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.data import IGNORED, Dataset, Loader
from tests.data.helpers import dataset, equal, pairs, sentences, steps


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("clearhead-data")]


def test_closing_early_ends_the_workers() -> None:
    iterator = iter(Loader(dataset("translation", pairs(200)), tokens=100, workers=3))
    next(iterator)
    assert workers()
    iterator.close()  # type: ignore[attr-defined]
    assert not workers()


def test_a_loop_that_is_left_ends_the_workers() -> None:
    for _ in Loader(dataset("translation", pairs(200)), tokens=100, workers=3):
        break
    assert not workers()


class Broken(Dataset):
    """A data set whose sixth batch cannot be made."""

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
        steps(Broken(data.task, data.stores), 50, tokens=100, workers=count)
    assert not workers()


def test_workers_stay_a_few_batches_ahead_and_no_more() -> None:
    data = dataset("translation", pairs(300))
    counting = Broken(data.task, data.stores)
    counting.made = -1000
    iterator = iter(Loader(counting, tokens=50, workers=2))
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
def test_processes_without_samples_get_a_batch_that_counts_for_nothing(
    task: str, records: list[Any], settings: dict[str, Any], packed: bool
) -> None:
    data = dataset(task, records, packed=packed, **settings)
    options: dict[str, Any] = {"tokens": 1, "pool": 10, "processes": 3, "workers": 0}
    (whole,) = steps(data, 1, tokens=1, pool=10, workers=0)
    shares = [steps(data, 1, rank=rank, **options)[0].batches[0] for rank in range(3)]
    assert equal(shares[0], whole.batches[0])
    for idle in shares[1:]:
        assert idle.tokens == 0
        assert idle.tensors.keys() == shares[0].tensors.keys()
        for name in ("labels", "next_sentence", "first_token", "last_token"):
            if name in idle.tensors:
                assert (idle[name] == IGNORED).all()
        shown = next(name for name in ("source", "ids", "first") if name in idle.tensors)
        assert torch.equal(idle[shown], shares[0][shown])


def test_batches_move_to_a_device_as_they_are() -> None:
    for packed in (False, True):
        batch = dataset("translation", pairs(5), packed=packed).batch(np.arange(5), 0, 0)
        assert equal(batch.to("cpu"), batch)
        there = batch.to("meta")
        assert all(tensor.device.type == "meta" for tensor in there.tensors.values())
        assert all(found.lengths.device.type == "meta" for found in there.documents.values())


def test_accumulation_cuts_a_global_batch_in_turn() -> None:
    data = dataset("translation", pairs(50))
    whole, parts = steps(data, 3, tokens=300, workers=0), steps(data, 3, tokens=300, workers=0, accumulation=3)
    for one, three in zip(whole, parts, strict=True):
        assert len(three.batches) == 3
        joined = [row[row >= 0].tolist() for batch in three.batches for row in batch["source_lengths"][:, None]]
        assert joined == one.batches[0]["source_lengths"][:, None].tolist()
