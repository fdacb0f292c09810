"""Batch order is a function of (seed, epoch), independent of world size, workers and resuming."""

import random
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.config.data import DataConfig
from clearhead.data import Batch, Dataset, Position, prepare
from clearhead.data.tasks import Translation
from clearhead.errors import UserError
from clearhead.files import read_lines
from clearhead.text import train
from tests.corpora import corpus
from tests.data.helpers import (
    dataset,
    epoch,
    equal,
    first_batches,
    loader,
    pairs,
    samples_of,
    sentences,
    tokenizer,
)

SETTINGS: dict[str, Any] = {"batch_tokens": 200, "bucket_size": 64, "seed": 5}


@pytest.fixture(scope="module")
def translation() -> Dataset:
    return dataset("translation", pairs(300))


@pytest.fixture(scope="module")
def masked() -> Dataset:
    lines = [(" ".join(sentences(5 + n % 7)),) for n in range(60)]
    return dataset("masked-language-model", lines, max_length=40, next_sentence=True, whole_word_masking=True)


@pytest.fixture(scope="module")
def language() -> Dataset:
    return dataset("language-model", [(line,) for line in sentences(200)], max_length=16, isolate_documents=True)


@pytest.fixture(params=["translation", "masked", "language", "mixed"])
def data(request: pytest.FixtureRequest) -> Dataset:
    if request.param != "mixed":
        return request.getfixturevalue(request.param)
    parts = [dataset("translation", pairs(count)) for count in (60, 90)]
    return Dataset(parts[0].task, [part.stores[0] for part in parts], [2.0, 0.5])


def test_every_epoch_is_a_new_permutation_of_all_samples(translation: Dataset) -> None:
    orders = [[sample for batch in epoch(translation, n, **SETTINGS) for sample in batch] for n in range(3)]
    for order in orders:
        assert sorted(order) == list(range(300))
    assert orders[0] != orders[1] != orders[2]
    assert epoch(translation, 0, **SETTINGS) == epoch(translation, 0, **SETTINGS)
    assert epoch(translation, 0, **SETTINGS | {"seed": 6}) != epoch(translation, 0, **SETTINGS)
    assert epoch(translation, 1, **SETTINGS) != epoch(translation, 0, **SETTINGS | {"seed": 6})


def test_the_samples_of_a_bucket_come_from_the_whole_corpus(translation: Dataset) -> None:
    first = [sample for batch in epoch(translation, 0, **SETTINGS)[:5] for sample in batch]
    assert max(first) > 200
    assert min(first) < 100


def test_the_batches_of_a_bucket_are_shuffled(translation: Dataset) -> None:
    lengths = [int(translation.lengths(np.array(batch), 0).max()) for batch in epoch(translation, 0, **SETTINGS)[:10]]
    assert lengths != sorted(lengths)


def test_buckets_and_length_order_change_with_epoch_and_seed(translation: Dataset) -> None:
    buckets, lengths = [], []
    for number, seed in ((0, 5), (1, 5), (0, 6)):
        options = SETTINGS | {"seed": seed}
        buckets.append({sample for batch in epoch(translation, number, **options)[:5] for sample in batch})
        one_bucket = epoch(translation, number, **options | {"bucket_size": 1000})
        lengths.append([int(translation.lengths(np.array(batch), 0).sum(1).max()) for batch in one_bucket])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert len(buckets[one] & buckets[other]) < 0.6 * len(buckets[one])
        assert sorted(lengths[one]) == pytest.approx(sorted(lengths[other]), abs=2), "the lengths are the same"
        assert sum(a == b for a, b in zip(lengths[one], lengths[other], strict=False)) < 0.4 * len(lengths[one])


def test_equal_samples_in_two_stores_get_different_masks(masked: Dataset) -> None:
    twice = Dataset(masked.task, [masked.stores[0]] * 2)
    size = masked.num_samples(0)
    first, second = (twice.batch(np.arange(n, n + 20), 0, 3)["labels"] for n in (0, size))
    assert first.shape != second.shape or (first != second).float().mean() > 0.1


def test_without_shuffling_there_is_one_epoch_sorted_by_length(translation: Dataset) -> None:
    batches = [step.plan.samples.tolist() for step in loader(translation, 200, shuffle=False)]
    assert sorted(sample for batch in batches for sample in batch) == list(range(300))
    max_lengths = [translation.lengths(np.array(batch), 0)[:, 0].max() for batch in batches]
    assert max_lengths == sorted(max_lengths)


@pytest.mark.parametrize("batch_tokens", [1, 30, 200, 4096])
def test_a_batch_never_exceeds_batch_tokens(data: Dataset, batch_tokens: int) -> None:
    for step in first_batches(data, 60, **SETTINGS | {"batch_tokens": batch_tokens, "workers": 0}):
        (batch,) = step.batches
        assert batch.padded_tokens <= batch_tokens or len(step.plan.samples) == 1
        assert 0 < batch.num_tokens <= batch.padded_tokens


def test_batches_are_as_full_as_possible(translation: Dataset) -> None:
    ordered = [step.plan.samples for step in loader(translation, 200, shuffle=False)]
    for current, following in pairwise(ordered):
        lengths = translation.lengths(np.append(current, following[0]), 0)
        assert len(lengths) * lengths.max(0).sum() > 200


def all_ranks(data: Dataset, count: int, world_size: int, workers: int, grad_accum: int = 1) -> list[list[Any]]:
    """Return the first global batches of every rank."""
    options = SETTINGS | {"world_size": world_size, "workers": workers, "grad_accum": grad_accum}
    return [first_batches(data, count, rank=rank, **options) for rank in range(world_size)]


def rows_of(batch: Batch) -> list[str]:
    """Return all fields of each sample without padding, as one string per sample."""
    if "ids" in batch.tensors and "ids_lengths" not in batch.tensors:  # windows of text
        fields = [batch[name].reshape(-1, 16).tolist() for name in ("ids", "labels")]
    else:
        sides = [name for name in ("source", "target", "ids", "segments", "labels") if name in batch.tensors]
        fields = [samples_of(batch, name) for name in sides]
    if "next_sentence" in batch.tensors:
        fields.append(batch["next_sentence"].tolist())
    return [str(row) for row in zip(*fields, strict=True)]


def test_world_size_and_workers_change_neither_order_nor_content(data: Dataset) -> None:
    reference = all_ranks(data, 60, 1, 0)[0]
    assert reference[-1].plan.epoch > 0
    for world_size, workers, grad_accum in (
        (1, 1, 1),
        (1, 4, 1),
        (2, 0, 1),
        (2, 1, 2),
        (2, 4, 1),
        (4, 0, 1),
        (4, 1, 1),
        (4, 4, 3),
    ):
        for row in zip(reference, *all_ranks(data, 60, world_size, workers, grad_accum), strict=True):
            expected, ranks = row[0], row[1:]
            assert all(rank.plan.samples.tolist() == expected.plan.samples.tolist() for rank in ranks)
            assert all(rank.next_position == expected.next_position for rank in ranks)
            parts = [batch for rank in ranks for batch in rank.batches]
            assert len(parts) == world_size * grad_accum
            labeled = [batch for batch in parts if batch.num_tokens]
            assert sorted(row for batch in labeled for row in rows_of(batch)) == sorted(rows_of(expected.batches[0]))
            assert sum(batch.num_tokens for batch in parts) == expected.batches[0].num_tokens


def test_resuming_anywhere_equals_an_uninterrupted_run(data: Dataset) -> None:
    options = SETTINGS | {"workers": 0, "batch_tokens": 100}
    reference = first_batches(data, 150, **options)
    ends = [n for n, step in enumerate(reference[:-4]) if step.next_position[1:] == (0, 0)]
    assert ends, "an epoch ends within these batches"
    rng = random.Random(1)
    for number in [*ends, *(rng.randrange(146) for _ in range(50 - len(ends)))]:
        position = Position(*reference[number].next_position)
        resumed = first_batches(data, 3, **options | {"position": position, "workers": rng.choice([0, 1])})
        for expected, actual in zip(reference[number + 1 :], resumed, strict=False):
            assert actual.plan.samples.tolist() == expected.plan.samples.tolist()
            assert actual.plan.epoch == expected.plan.epoch
            assert actual.next_position == expected.next_position
            assert equal(actual.batches[0], expected.batches[0])


def test_masks_depend_only_on_seed_epoch_and_sample(masked: Dataset) -> None:
    alone = masked.batch(np.array([7]), 3, 11)
    for others in ([7, 1, 2], [40, 7], [3, 4, 5, 6, 7]):
        mixed = masked.batch(np.array(others), 3, 11)
        row, length = others.index(7), int(alone["ids_lengths"][0])
        for name in ("ids", "labels", "segments"):
            assert mixed[name][row, :length].tolist() == alone[name][0].tolist()
        assert mixed["next_sentence"][row] == alone["next_sentence"][0]
    labels = [str(masked.batch(np.arange(20), *key)["labels"].tolist()) for key in ((3, 11), (4, 11), (3, 12))]
    assert len(set(labels)) == 3


def test_weights_give_exact_sample_counts() -> None:
    parts = [dataset("translation", pairs(count)) for count in (40, 60, 30)]
    mixed = Dataset(parts[0].task, [part.stores[0] for part in parts], [2.0, 0.5, 1.0])
    assert mixed.num_samples(0) == 80 + 30 + 30
    counts = [Counter(sample for batch in epoch(mixed, n, **SETTINGS) for sample in batch) for n in range(4)]
    for count in counts:
        assert all(count[sample] == 2 for sample in range(40))
        assert all(count[sample] == 1 for sample in range(100, 130))
    for first, second in ((0, 1), (1, 2), (2, 3)):
        both = counts[first] + counts[second]
        assert all(both[sample] == 1 for sample in range(40, 100))
    assert counts[0] != counts[1]
    thirds = Dataset(parts[0].task, [parts[1].stores[0]], [1 / 3])
    three = [sample for n in range(3) for batch in epoch(thirds, n, **SETTINGS) for sample in batch]
    assert sorted(three) == list(range(60))


def test_a_batch_of_two_stores_equals_that_of_one() -> None:
    for kind in ("byte-bpe", "unigram"):  # unigram's pad is not 0
        rows = pairs(50)
        parts = [dataset("translation", part, kind) for part in (rows[:20], rows[20:])]
        mixed, single = Dataset(parts[0].task, [part.stores[0] for part in parts]), dataset("translation", rows, kind)
        chosen = np.array([3, 7, 19, 20, 25, 49])
        assert equal(mixed.batch(chosen, 0, 0), single.batch(chosen, 0, 0))
        assert np.array_equal(mixed.lengths(chosen[::-1], 0), single.lengths(chosen[::-1], 0))
        packed = DataConfig.build({"task": "translation", "packed": True})
        mixed.task = single.task = Translation(packed, [tokenizer(kind)])
        assert equal(mixed.batch(chosen, 0, 0), single.batch(chosen, 0, 0))


def test_a_dataset_without_samples_is_an_error() -> None:
    with pytest.raises(UserError, match="data: no samples; all records were dropped"):
        next(iter(loader(dataset("translation", []), 10)))


def test_multi30k_batches_have_little_padding(tmp_path: Path) -> None:
    files = [str(corpus(f"multi30k/train.{side}.gz")) for side in ("en", "de")]
    settings = DataConfig.build(
        {"task": "translation", "train": {"format": "parallel", "files": files}, "cache_dir": str(tmp_path)}
    )
    lines = [line for file in files for line in islice(read_lines(Path(file)), 0, None, 8)]
    data = prepare(settings, [train(lines, "byte-bpe", 4000)]).train
    tokens = padded = rows = 0
    for step in loader(data, 4096, bucket_size=settings.bucket_size, seed=1):
        if step.plan.epoch:
            break
        (batch,) = step.batches
        assert batch.padded_tokens <= 4096
        tokens, padded, rows = tokens + batch.num_tokens, padded + batch.padded_tokens, rows + len(step.plan.samples)
    assert rows == data.num_samples(0) > 28_000
    assert tokens / padded >= 0.94, f"{tokens / padded:.4f}"
