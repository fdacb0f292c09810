"""Cleaning: normalization, lowercasing, length limits, deduplication, the held-out split."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config.data import DataConfig
from clearhead.data.cleaning import Cleaner, DuplicateFilter, Split, chunks, hash_fraction
from clearhead.data.formats import TAGS, TEXT, TRANSLATION, Location, Record
from tests.data.helpers import dataset, prepared, tokenizer, write


def clean_values(
    rows: list[tuple[Any, ...]], columns: tuple[str, ...], size: int = 3, **settings: Any
) -> list[tuple[Any, ...]]:
    """Return the values that remain of rows in chunks of `size`."""
    cleaner = Cleaner(DataConfig.build({"task": "translation", **settings}), columns, "all")
    records = [Record(Location("file", n), row) for n, row in enumerate(rows)]
    return [r.values for start in range(0, len(rows), size) for r in cleaner.clean_chunk(records[start : start + size])]


def test_texts_are_normalized_but_labels_are_not() -> None:
    row = ("ＡÄﬁ", "Ⅻ")
    assert clean_values([row], TRANSLATION) == [row]
    assert clean_values([row], TRANSLATION, normalize="nfc") == [("ＡÄﬁ", "Ⅻ")]
    assert clean_values([row], TRANSLATION, normalize="nfkc") == [("AÄfi", "XII")]
    assert clean_values([row], TRANSLATION, lowercase=True) == [("ａäﬁ", "ⅻ")]
    assert clean_values([("Good", "POS")], (*TEXT, "label"), lowercase=True) == [("good", "POS")]
    assert clean_values([(["EU"], ["B-ORG"])], TAGS, lowercase=True) == [(["eu"], ["B-ORG"])]


def test_lowercasing_keeps_labels_from_file_to_batch(tmp_path: Path) -> None:
    files = write(tmp_path / "rows", ["Good\tPOS", "Bad\tNEG"])
    data = prepared(tmp_path, "classification", train={"format": "tsv", "files": files}, lowercase=True)
    assert data.labels == ("NEG", "POS")
    batch = data.train.batch(np.arange(2), 0, 0)
    assert batch["labels"].tolist() == [1, 0]
    assert tokenizer().decode(batch["ids"][0].tolist()) == "good"
    tags = write(tmp_path / "tags", ["EU B-ORG", "x O"])
    data = prepared(tmp_path, "tagging", train={"format": "conll", "files": tags}, lowercase=True)
    assert data.labels == ("O", "B-ORG")


def test_length_limits_count_tokens_and_drops_are_counted_by_reason() -> None:
    size = len(tokenizer().encode("a a a a"))
    assert size == 4
    rows = [
        ("a", "a"),
        ("a a", "a a a"),
        ("a a", "a a a a a"),
        ("a a a a", "a a a a"),
        ("", "a"),
        ("a " * 9 + "a", "a a a a a"),
    ]
    data = dataset("translation", rows, min_length=2, max_length=6, max_length_ratio=2.0)
    lengths = data.lengths(np.arange(data.num_samples(0)), 0)
    assert lengths.tolist() == [[3, 4], [5, 5]]
    assert data.stores[0].dropped == {"too short": 1, "ratio": 1, "empty": 1, "too long": 1}
    assert dataset("translation", [("a " * 4 + "a", "a")], max_length=6).num_samples(0) == 1, (
        "six tokens with the end token"
    )
    assert dataset("translation", [("a " * 5 + "a", "a"), ("a", "a")], max_length=6).num_samples(0) == 1
    assert dataset("translation", [("a", "a " * 5 + "a"), ("a", "a")], max_length=6).num_samples(0) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), max_size=30), st.integers(1, 7))
def test_duplicates_are_found_across_chunks(rows: list[tuple[str, str]], size: int) -> None:
    assert clean_values(rows, TRANSLATION, size, deduplicate=True) == list(dict.fromkeys(rows))
    assert clean_values(rows, TRANSLATION, size) == rows


@given(st.lists(st.lists(st.integers(0, 50), max_size=9), max_size=30))
def test_the_duplicate_filter_equals_a_set(parts: list[list[int]]) -> None:
    seen, known = DuplicateFilter(), set[int]()
    for part in parts:
        new = seen.add(np.array(part, np.uint64))
        for number, is_new in zip(part, new, strict=True):
            assert is_new == (number not in known)
            known.add(number)
    assert len(seen.runs) <= 7


def test_deduplication_follows_lowercasing() -> None:
    rows = [("A", "X"), ("a", "x")]
    assert len(clean_values(rows, TRANSLATION, deduplicate=True, lowercase=True)) == 1
    assert len(clean_values(rows, TRANSLATION, deduplicate=True)) == 2


def test_no_source_is_in_both_train_and_validation(tmp_path: Path) -> None:
    rows = [(f"s{source}", f"t{source} {n}") for source in range(400) for n in range(3)]
    file = write(tmp_path / "pairs", ("\t".join(row) for row in rows))
    data = prepared(tmp_path, "translation", train={"format": "tsv", "files": file}, held_out=0.25)
    assert data.valid is not None
    parts = []
    for part in (data.train, data.valid):
        store = part.stores[0]
        parts.append([tuple(store.gather("source", np.array([n]))[0].tolist()) for n in range(len(store))])
    assert not set(parts[0]) & set(parts[1])
    assert len(parts[0]) + len(parts[1]) == 1200
    assert set(Counter(parts[1]).values()) == {3}
    assert pytest.approx(len(parts[1]), abs=6 * 3 * (400 * 0.25 * 0.75) ** 0.5) == 0.25 * 400 * 3


@pytest.mark.parametrize("held_out", [0.02, 0.1, 0.38])
def test_held_out_gives_its_fraction_and_is_deterministic(held_out: float) -> None:
    records = [Record(Location("file", n), (f"source {n}", f"target {n % 7}")) for n in range(20_000)]
    config = DataConfig.build({"task": "translation", "held_out": held_out})

    def split(name: Split, records: list[Record] = records) -> list[str]:
        return [record.values[0] for record in Cleaner(config, TRANSLATION, name).clean_chunk(records)]

    valid = split("held out")
    deviation = (held_out * (1 - held_out) / len(records)) ** 0.5
    assert len(valid) / len(records) == pytest.approx(held_out, abs=4 * deviation)
    assert split("held out") == valid
    assert sorted([*split("kept"), *valid]) == sorted(record.values[0] for record in records)
    other_targets = [record._replace(values=(record.values[0], "another target")) for record in records]
    assert split("held out", other_targets) == valid, "the source side decides"
    assert split("held out", records[::-1]) == valid[::-1], "the order of the records does not matter"


def test_the_held_out_split_is_stable_across_versions() -> None:
    fractions = [hash_fraction(f"source {n}") for n in range(20_000)]
    assert 0 <= min(fractions) < 0.001
    assert 0.999 < max(fractions) < 1
    assert [n for n, fraction in enumerate(fractions[:50]) if fraction < 0.1] == [9, 21, 24, 28, 29, 39, 42, 48]


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 9), st.integers(1, 60))
def test_chunks_are_bounded_and_lose_nothing(sizes: list[int], max_records: int, max_chars: int) -> None:
    records = [Record(Location("file", n), ("x" * size,)) for n, size in enumerate(sizes)]
    result = list(chunks(iter(records), max_records, max_chars))
    assert [record for chunk in result for record in chunk] == records
    for chunk in result:
        assert 0 < len(chunk) <= max_records
        assert len(chunk) == 1 or sum(len(record.values[0]) for record in chunk) <= max_chars
