"""Pairs in both orders: to learn from, never to be scored on, and in neither order when they are held out."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.config.data import DataConfig, TokenizerConfig
from clearhead.data import Data, Dataset, from_records, open_set, prepare
from clearhead.data.clean import share
from clearhead.errors import ConfigError
from clearhead.evaluate.labeled import records
from tests.data.helpers import config, epoch, prepared, sentences, tokenizer, write

SEPARATOR = tokenizer().id("separator")


def pairs_of(data: Dataset | None) -> list[tuple[str, str, Any]]:
    """The texts and the label of every sample."""
    assert data is not None
    found = []
    for sample in range(data.size(0)):
        batch = data.batch(np.array([sample]), 0, 0)
        ids = batch["ids"][0].tolist()
        middle = ids.index(SEPARATOR)
        texts = tokenizer().decode(ids[1:middle]), tokenizer().decode(ids[middle + 1 : -1])
        found.append((*texts, batch["labels"][0].item()))
    return found


def turned(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(second, first, *rest) for first, second, *rest in rows]


def file_of(folder: Path, rows: list[tuple[str, str, int]]) -> dict[str, str]:
    return {"format": "tsv", "files": write(folder / "rows", ("\t".join(map(str, row)) for row in rows))}


def rows_of(count: int) -> list[tuple[str, str, int]]:
    return [(f"a {text}", f"b {text}", n % 2) for n, text in enumerate(sentences(count))]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_every_pair_is_learned_in_both_orders_and_scored_in_one(task: str, tmp_path: Path) -> None:
    rows = rows_of(20)
    files = file_of(tmp_path, rows)  # the same for both, so that one cannot be found in the other's cache
    settings: dict[str, Any] = {"train": files, "valid": files, "text_pairs": True}
    for _ in range(2):  # made, and found
        data = prepared(tmp_path, task, swap_pairs=True, **settings)
        assert Counter(pairs_of(data.train)) == Counter([*rows, *turned(rows)])
        assert pairs_of(data.valid) == rows
    plain = prepared(tmp_path, task, **settings)
    assert pairs_of(plain.train) == rows
    assert plain.valid is not None
    assert data.valid is not None
    assert plain.valid.stores[0].folder == data.valid.stores[0].folder, "validation data need not be made anew"


def test_what_is_held_out_is_learned_in_neither_order(tmp_path: Path) -> None:
    rows = rows_of(200)
    settings = config(
        tmp_path, "classification", train=file_of(tmp_path, rows), text_pairs=True, swap_pairs=True, held_out=0.3
    )
    data = prepare(settings, [tokenizer()])
    held = [row for row in rows if share(row[0]) < 0.3]
    kept = [row for row in rows if row not in held]
    assert 30 < len(held) < 90
    assert any(share(row[1]) < 0.3 for row in kept), "one whose exchanged form would be held out is kept as well"
    assert pairs_of(data.valid) == held
    assert Counter(pairs_of(data.train)) == Counter([*kept, *turned(kept)])
    assert [record.values for record in records(settings, ())] == [(a, b, str(label)) for a, b, label in held]


def test_an_epoch_has_each_order_once(tmp_path: Path) -> None:
    data = prepared(tmp_path, "regression", train=file_of(tmp_path, rows_of(30)), text_pairs=True, swap_pairs=True)
    assert data.train.size(0) == 60
    for number in range(2):
        drawn = [sample for batch in epoch(data.train, number, tokens=90) for sample in batch]
        assert sorted(drawn) == list(range(60))


@pytest.mark.parametrize(("deduplicate", "times"), [(False, {2, 1}), (True, {1})])
def test_without_duplicates_each_order_stays_once(deduplicate: bool, times: set[int], tmp_path: Path) -> None:
    rows = [("cat", "dog", 0), ("dog", "cat", 0), ("fox", "fox", 1), ("a", "mat", 1)]
    files = file_of(tmp_path, rows)
    data: Data = prepared(
        tmp_path, "classification", train=files, text_pairs=True, swap_pairs=True, deduplicate=deduplicate
    )
    found = Counter(pairs_of(data.train))
    assert set(found) == {*rows, ("mat", "a", 1)}
    assert set(found.values()) == times
    assert data.train.stores[0].facts["dropped"] == ({"duplicate": 3} if deduplicate else {})


def test_test_sets_iterables_and_tokenizers_have_one_order(tmp_path: Path) -> None:
    rows = rows_of(20)
    settings = config(tmp_path, "regression", train=file_of(tmp_path, rows), text_pairs=True, swap_pairs=True)
    assert pairs_of(open_set(settings, settings.train, [tokenizer()])) == rows
    assert pairs_of(from_records(settings, rows, [tokenizer()])) == rows
    kind, plain = TokenizerConfig(vocab_size=300), settings.model_copy(update={"swap_pairs": False})
    one, two = (prepare(each, kind).tokenizers[0].engine.to_str() for each in (settings, plain))
    assert one == two


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "classification"}, "swap_pairs: there is only one text to a record; set second to true"),
        ({"task": "similarity"}, "swap_pairs: for classification and regression of two texts; the task is similarity"),
        ({"task": "translation", "text_pairs": True}, "swap_pairs: for classification .*; the task is translation"),
    ],
)
def test_both_orders_need_two_texts_that_are_read_together(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DataConfig.build(settings | {"swap_pairs": True})
