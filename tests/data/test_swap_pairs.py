"""swap_pairs: training has both orders, validation one, and held-out pairs are in training in neither."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.config.data import DataConfig, TokenizerConfig
from clearhead.data import Data, Dataset, from_records, open_dataset, prepare
from clearhead.data.cleaning import hash_fraction
from clearhead.errors import ConfigError
from clearhead.evaluate.labeled import records
from tests.data.helpers import config, epoch, prepared, sentences, tokenizer, write

SEPARATOR = tokenizer().id("separator")


def pairs_of(data: Dataset | None) -> list[tuple[str, str, Any]]:
    """Return the texts and label of every sample."""
    assert data is not None
    rows = []
    for sample in range(data.num_samples(0)):
        batch = data.batch(np.array([sample]), 0, 0)
        ids = batch["ids"][0].tolist()
        middle = ids.index(SEPARATOR)
        texts = tokenizer().decode(ids[1:middle]), tokenizer().decode(ids[middle + 1 : -1])
        rows.append((*texts, batch["labels"][0].item()))
    return rows


def swapped(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(second, first, *rest) for first, second, *rest in rows]


def file_of(folder: Path, rows: list[tuple[str, str, int]]) -> dict[str, str]:
    return {"format": "tsv", "files": write(folder / "rows", ("\t".join(map(str, row)) for row in rows))}


def rows_of(count: int) -> list[tuple[str, str, int]]:
    return [(f"a {text}", f"b {text}", n % 2) for n, text in enumerate(sentences(count))]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_training_has_both_orders_and_validation_one(task: str, tmp_path: Path) -> None:
    rows = rows_of(20)
    files = file_of(tmp_path, rows)  # the same for both: the cache must tell them apart
    settings: dict[str, Any] = {"train": files, "valid": files, "text_pairs": True}
    for _ in range(2):  # built, then cached
        data = prepared(tmp_path, task, swap_pairs=True, **settings)
        assert Counter(pairs_of(data.train)) == Counter([*rows, *swapped(rows)])
        assert pairs_of(data.valid) == rows
    plain = prepared(tmp_path, task, **settings)
    assert pairs_of(plain.train) == rows
    assert plain.valid is not None
    assert data.valid is not None
    assert plain.valid.stores[0].folder == data.valid.stores[0].folder, "validation data stay cached"


def test_held_out_pairs_are_in_training_in_neither_order(tmp_path: Path) -> None:
    rows = rows_of(200)
    settings = config(
        tmp_path, "classification", train=file_of(tmp_path, rows), text_pairs=True, swap_pairs=True, held_out=0.3
    )
    data = prepare(settings, [tokenizer()])
    held = [row for row in rows if hash_fraction(row[0]) < 0.3]
    kept = [row for row in rows if row not in held]
    assert 30 < len(held) < 90
    assert any(hash_fraction(row[1]) < 0.3 for row in kept), "some pairs have a second text that would be held out"
    assert pairs_of(data.valid) == held
    assert Counter(pairs_of(data.train)) == Counter([*kept, *swapped(kept)])
    assert [record.values for record in records(settings, ())] == [(a, b, str(label)) for a, b, label in held]


def test_an_epoch_has_each_order_once(tmp_path: Path) -> None:
    data = prepared(tmp_path, "regression", train=file_of(tmp_path, rows_of(30)), text_pairs=True, swap_pairs=True)
    assert data.train.num_samples(0) == 60
    for number in range(2):
        samples = [sample for batch in epoch(data.train, number, batch_tokens=90) for sample in batch]
        assert sorted(samples) == list(range(60))


@pytest.mark.parametrize(("deduplicate", "times"), [(False, {2, 1}), (True, {1})])
def test_deduplication_keeps_each_order_once(deduplicate: bool, times: set[int], tmp_path: Path) -> None:
    rows = [("cat", "dog", 0), ("dog", "cat", 0), ("fox", "fox", 1), ("a", "mat", 1)]
    files = file_of(tmp_path, rows)
    data: Data = prepared(
        tmp_path, "classification", train=files, text_pairs=True, swap_pairs=True, deduplicate=deduplicate
    )
    counts = Counter(pairs_of(data.train))
    assert set(counts) == {*rows, ("mat", "a", 1)}
    assert set(counts.values()) == times
    assert data.train.stores[0].dropped == ({"duplicate": 3} if deduplicate else {})


def test_test_sets_iterables_and_tokenizers_use_one_order(tmp_path: Path) -> None:
    rows = rows_of(20)
    settings = config(tmp_path, "regression", train=file_of(tmp_path, rows), text_pairs=True, swap_pairs=True)
    assert pairs_of(open_dataset(settings, settings.train, [tokenizer()])) == rows
    assert pairs_of(from_records(settings, rows, [tokenizer()])) == rows
    kind, plain = TokenizerConfig(vocab_size=300), settings.model_copy(update={"swap_pairs": False})
    one, two = (prepare(each, kind).tokenizers[0].engine.to_str() for each in (settings, plain))
    assert one == two


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "classification"}, "swap_pairs: records have only one text; set text_pairs to true"),
        ({"task": "similarity"}, "swap_pairs: for classification and regression of text pairs; the task is similarity"),
        ({"task": "translation", "text_pairs": True}, "swap_pairs: for classification .*; the task is translation"),
    ],
)
def test_swap_pairs_needs_a_task_with_text_pairs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig.build(settings | {"swap_pairs": True})
