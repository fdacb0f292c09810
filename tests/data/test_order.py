"""The order of samples depends on (seed, epoch) alone: not on processes, workers, or where a run was resumed."""

import random
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.config.data import DataConfig
from clearhead.data import Batch, Dataset, Loader, Position, prepare
from clearhead.data.tasks import Translation
from clearhead.errors import UserError
from clearhead.files import read_lines
from clearhead.text import train
from tests.corpora import corpus
from tests.data.helpers import dataset, epoch, equal, pairs, samples_of, sentences, steps, tokenizer

SETTINGS: dict[str, Any] = {"tokens": 200, "pool": 64, "seed": 5}


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


def test_every_epoch_has_each_sample_once_in_another_order(translation: Dataset) -> None:
    found = [[sample for batch in epoch(translation, n, **SETTINGS) for sample in batch] for n in range(3)]
    for order in found:
        assert sorted(order) == list(range(300))
    assert found[0] != found[1] != found[2]
    assert epoch(translation, 0, **SETTINGS) == epoch(translation, 0, **SETTINGS)
    assert epoch(translation, 0, **SETTINGS | {"seed": 6}) != epoch(translation, 0, **SETTINGS)
    assert epoch(translation, 1, **SETTINGS) != epoch(translation, 0, **SETTINGS | {"seed": 6})


def test_samples_of_a_pool_come_from_everywhere(translation: Dataset) -> None:
    first = [sample for batch in epoch(translation, 0, **SETTINGS)[:5] for sample in batch]
    assert max(first) > 200
    assert min(first) < 100


def test_batches_of_a_pool_are_shuffled(translation: Dataset) -> None:
    widths = [int(translation.lengths(np.array(batch), 0).max()) for batch in epoch(translation, 0, **SETTINGS)[:10]]
    assert widths != sorted(widths)


def test_pools_and_the_order_of_lengths_change_with_every_epoch_and_seed(translation: Dataset) -> None:
    pools, widths = [], []
    for number, seed in ((0, 5), (1, 5), (0, 6)):
        options = SETTINGS | {"seed": seed}
        pools.append({sample for batch in epoch(translation, number, **options)[:5] for sample in batch})
        in_one = epoch(translation, number, **options | {"pool": 1000})
        widths.append([int(translation.lengths(np.array(batch), 0).sum(1).max()) for batch in in_one])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert len(pools[one] & pools[other]) < 0.6 * len(pools[one])
        assert sorted(widths[one]) == pytest.approx(sorted(widths[other]), abs=2), "the lengths are the same"
        assert sum(a == b for a, b in zip(widths[one], widths[other], strict=False)) < 0.4 * len(widths[one])


def test_equal_samples_of_two_stores_are_masked_differently(masked: Dataset) -> None:
    twice = Dataset(masked.task, [masked.stores[0]] * 2)
    size = masked.size(0)
    first, second = (twice.batch(np.arange(n, n + 20), 0, 3)["labels"] for n in (0, size))
    assert first.shape != second.shape or (first != second).float().mean() > 0.1


def test_without_shuffling_there_is_one_epoch_and_batches_go_up_in_length(translation: Dataset) -> None:
    found = [step.plan.samples.tolist() for step in Loader(translation, tokens=200, pool=1 << 15, shuffle=False)]
    assert sorted(sample for batch in found for sample in batch) == list(range(300))
    max_length = [translation.lengths(np.array(batch), 0)[:, 0].max() for batch in found]
    assert max_length == sorted(max_length)


@pytest.mark.parametrize("tokens", [1, 30, 200, 4096])
def test_a_batch_never_has_more_padded_tokens_than_allowed(data: Dataset, tokens: int) -> None:
    for step in steps(data, 60, **SETTINGS | {"tokens": tokens, "workers": 0}):
        (batch,) = step.batches
        assert batch.size <= tokens or len(step.plan.samples) == 1
        assert 0 < batch.tokens <= batch.size


def test_a_sample_fills_the_batch_until_the_next_would_be_too_much(translation: Dataset) -> None:
    ordered = [step.plan.samples for step in Loader(translation, tokens=200, shuffle=False)]
    for here, there in pairwise(ordered):
        lengths = translation.lengths(np.append(here, there[0]), 0)
        assert len(lengths) * lengths.max(0).sum() > 200


def split(data: Dataset, count: int, processes: int, workers: int, accumulation: int = 1) -> list[list[Any]]:
    """The steps of every process."""
    options = SETTINGS | {"processes": processes, "workers": workers, "accumulation": accumulation}
    return [steps(data, count, rank=rank, **options) for rank in range(processes)]


def rows_of(batch: Batch) -> list[str]:
    """Everything that belongs to each sample of a batch, without padding, as one text."""
    if "ids" in batch.tensors and "ids_lengths" not in batch.tensors:  # windows of text
        found = [batch[name].reshape(-1, 16).tolist() for name in ("ids", "labels")]
    else:
        sides = [name for name in ("source", "target", "ids", "segments", "labels") if name in batch.tensors]
        found = [samples_of(batch, name) for name in sides]
    if "next_sentence" in batch.tensors:
        found.append(batch["next_sentence"].tolist())
    return [str(row) for row in zip(*found, strict=True)]


def test_processes_and_workers_change_neither_order_nor_content(data: Dataset) -> None:
    reference = split(data, 60, 1, 0)[0]
    assert reference[-1].plan.epoch > 0
    for processes, workers, accumulation in (
        (1, 1, 1),
        (1, 4, 1),
        (2, 0, 1),
        (2, 1, 2),
        (2, 4, 1),
        (4, 0, 1),
        (4, 1, 1),
        (4, 4, 3),
    ):
        for row in zip(reference, *split(data, 60, processes, workers, accumulation), strict=True):
            whole, shares = row[0], row[1:]
            assert all(share.plan.samples.tolist() == whole.plan.samples.tolist() for share in shares)
            assert all(share.after == whole.after for share in shares)
            parts = [batch for share in shares for batch in share.batches]
            assert len(parts) == processes * accumulation
            real = [batch for batch in parts if batch.tokens]
            assert sorted(row for batch in real for row in rows_of(batch)) == sorted(rows_of(whole.batches[0]))
            assert sum(batch.tokens for batch in parts) == whole.batches[0].tokens


def test_resuming_anywhere_goes_on_as_if_nothing_had_happened(data: Dataset) -> None:
    options = SETTINGS | {"workers": 0, "tokens": 100}
    reference = steps(data, 150, **options)
    ends = [n for n, step in enumerate(reference[:-4]) if step.after[1:] == (0, 0)]
    assert ends, "an epoch ends among them"
    chooser = random.Random(1)
    for number in [*ends, *(chooser.randrange(146) for _ in range(50 - len(ends)))]:
        position = Position(*reference[number].after)
        resumed = steps(data, 3, **options | {"position": position, "workers": chooser.choice([0, 1])})
        for there, here in zip(reference[number + 1 :], resumed, strict=False):
            assert here.plan.samples.tolist() == there.plan.samples.tolist()
            assert here.plan.epoch == there.plan.epoch
            assert here.after == there.after
            assert equal(here.batches[0], there.batches[0])


def test_masks_depend_on_seed_epoch_and_sample_only(masked: Dataset) -> None:
    alone = masked.batch(np.array([7]), 3, 11)
    for others in ([7, 1, 2], [40, 7], [3, 4, 5, 6, 7]):
        there = masked.batch(np.array(others), 3, 11)
        row, length = others.index(7), int(alone["ids_lengths"][0])
        for name in ("ids", "labels", "segments"):
            assert there[name][row, :length].tolist() == alone[name][0].tolist()
        assert there["next_sentence"][row] == alone["next_sentence"][0]
    labels = [str(masked.batch(np.arange(20), *key)["labels"].tolist()) for key in ((3, 11), (4, 11), (3, 12))]
    assert len(set(labels)) == 3


def test_weights_repeat_and_spread_samples_exactly() -> None:
    parts = [dataset("translation", pairs(count)) for count in (40, 60, 30)]
    mixed = Dataset(parts[0].task, [part.stores[0] for part in parts], [2.0, 0.5, 1.0])
    assert mixed.size(0) == 80 + 30 + 30
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


def test_a_mixed_batch_is_what_one_store_would_give() -> None:
    for kind in ("byte-bpe", "unigram"):  # unigram's pad is not 0
        rows = pairs(50)
        parts = [dataset("translation", part, kind) for part in (rows[:20], rows[20:])]
        mixed, whole = Dataset(parts[0].task, [part.stores[0] for part in parts]), dataset("translation", rows, kind)
        chosen = np.array([3, 7, 19, 20, 25, 49])
        assert equal(mixed.batch(chosen, 0, 0), whole.batch(chosen, 0, 0))
        assert np.array_equal(mixed.lengths(chosen[::-1], 0), whole.lengths(chosen[::-1], 0))
        packed = DataConfig.build({"task": "translation", "packed": True})
        mixed.task = whole.task = Translation(packed, [tokenizer(kind)])
        assert equal(mixed.batch(chosen, 0, 0), whole.batch(chosen, 0, 0))


def test_data_without_samples_is_an_error() -> None:
    with pytest.raises(UserError, match="the data has no samples"):
        next(iter(Loader(dataset("translation", []), tokens=10)))


def test_multi30k_batches_are_nearly_all_real_tokens(tmp_path: Path) -> None:
    files = [str(corpus(f"multi30k/train.{side}.gz")) for side in ("en", "de")]
    settings = DataConfig.build(
        {"task": "translation", "train": {"format": "parallel", "files": files}, "cache_dir": str(tmp_path)}
    )
    lines = [line for file in files for line in islice(read_lines(Path(file)), 0, None, 8)]
    data = prepare(settings, [train(lines, "byte-bpe", 4000)]).train
    real = padded = rows = 0
    for step in Loader(data, tokens=4096, pool=settings.bucket_size, seed=1):
        if step.plan.epoch:
            break
        (batch,) = step.batches
        assert batch.size <= 4096
        real, padded, rows = real + batch.tokens, padded + batch.size, rows + len(step.plan.samples)
    assert rows == data.size(0) > 28_000
    assert real / padded >= 0.94, f"{real / padded:.4f}"
