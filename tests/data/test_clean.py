"""Cleaning: normal forms, lower case, lengths and ratio, duplicates, and a held-out part that shares no source."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config.data import DataConfig
from clearhead.data.clean import Cleaner, Seen, chunks
from clearhead.data.formats import TAGS, TEXT, TRANSLATION, Place, Record
from tests.data.helpers import dataset, prepared, sentences, tokenizer, write


def cleaned(
    rows: list[tuple[Any, ...]], columns: tuple[str, ...], size: int = 3, **settings: Any
) -> list[tuple[Any, ...]]:
    """The values that are left of rows that come in chunks of `size`."""
    cleaner = Cleaner(DataConfig.build({"task": "translation", **settings}), columns, settings.get("part", "all"))
    records = [Record(Place("file", n), row) for n, row in enumerate(rows)]
    return [r.values for start in range(0, len(rows), size) for r in cleaner.chunk(records[start : start + size])]


def test_texts_are_normalized_and_labels_are_not() -> None:
    row = ("ＡÄﬁ", "Ⅻ")
    assert cleaned([row], TRANSLATION) == [row]
    assert cleaned([row], TRANSLATION, normalize="nfc") == [("ＡÄﬁ", "Ⅻ")]
    assert cleaned([row], TRANSLATION, normalize="nfkc") == [("AÄfi", "XII")]
    assert cleaned([row], TRANSLATION, lowercase=True) == [("ａäﬁ", "ⅻ")]
    assert cleaned([("Good", "POS")], (*TEXT, "label"), lowercase=True) == [("good", "POS")]
    assert cleaned([(["EU"], ["B-ORG"])], TAGS, lowercase=True) == [(["eu"], ["B-ORG"])]


def test_lower_case_texts_keep_their_labels_from_file_to_batch(tmp_path: Path) -> None:
    files = write(tmp_path / "rows", ["Good\tPOS", "Bad\tNEG"])
    data = prepared(tmp_path, "classification", train={"format": "tsv", "files": files}, lowercase=True)
    assert data.labels == ("NEG", "POS")
    batch = data.train.batch(np.arange(2), 0, 0)
    assert batch["labels"].tolist() == [1, 0]
    assert tokenizer().decode(batch["ids"][0].tolist()) == "good"
    tags = write(tmp_path / "tags", ["EU B-ORG", "x O"])
    data = prepared(tmp_path, "tagging", train={"format": "conll", "files": tags}, lowercase=True)
    assert data.labels == ("O", "B-ORG")


def test_lengths_and_ratio_are_counted_in_tokens_and_by_reason() -> None:
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
    made = dataset("translation", rows, min_length=2, max_length=6, max_length_ratio=2.0)
    lengths = made.lengths(np.arange(made.size(0)), 0)
    assert lengths.tolist() == [[3, 4], [5, 5]]
    assert made.stores[0].facts["dropped"] == {"too short": 1, "ratio": 1, "empty": 1, "too long": 1}
    assert dataset("translation", [("a " * 4 + "a", "a")], max_length=6).size(0) == 1, "with its end it has six tokens"
    assert dataset("translation", [("a " * 5 + "a", "a"), ("a", "a")], max_length=6).size(0) == 1
    assert dataset("translation", [("a", "a " * 5 + "a"), ("a", "a")], max_length=6).size(0) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), max_size=30), st.integers(1, 7))
def test_duplicates_are_found_across_chunks(rows: list[tuple[str, str]], size: int) -> None:
    assert cleaned(rows, TRANSLATION, size, deduplicate=True) == list(dict.fromkeys(rows))
    assert cleaned(rows, TRANSLATION, size) == rows


@given(st.lists(st.lists(st.integers(0, 50), max_size=9), max_size=30))
def test_digests_met_before_are_remembered(parts: list[list[int]]) -> None:
    seen, known = Seen(), set[int]()
    for part in parts:
        new = seen.first_time(np.array(part, np.uint64))
        for number, is_new in zip(part, new, strict=True):
            assert is_new == (number not in known)
            known.add(number)
    assert len(seen.runs) <= 7


def test_duplicates_that_differ_in_case_are_one_when_cleaned() -> None:
    rows = [("A", "X"), ("a", "x")]
    assert len(cleaned(rows, TRANSLATION, deduplicate=True, lowercase=True)) == 1
    assert len(cleaned(rows, TRANSLATION, deduplicate=True)) == 2


def test_no_source_is_both_kept_and_held_out(tmp_path: Path) -> None:
    sources = sentences(400)
    rows = [(source, f"{source} {n}") for source in sources for n in range(3)]
    file = write(tmp_path / "pairs", ("\t".join(row) for row in rows))
    data = prepared(tmp_path, "translation", train={"format": "tsv", "files": file}, held_out=0.25)
    assert data.valid is not None
    parts = []
    for part in (data.train, data.valid):
        store = part.stores[0]
        parts.append([tuple(store.take("source", np.array([n]))[0].tolist()) for n in range(len(store))])
    assert not set(parts[0]) & set(parts[1])
    assert len(parts[0]) + len(parts[1]) == 1200
    assert set(Counter(parts[1]).values()) == {3}
    assert pytest.approx(len(parts[1]), abs=6 * 3 * (400 * 0.25 * 0.75) ** 0.5) == 0.25 * 400 * 3


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 9), st.integers(1, 60))
def test_chunks_are_bounded_and_lose_nothing(sizes: list[int], most: int, characters: int) -> None:
    records = [Record(Place("file", n), ("x" * size,)) for n, size in enumerate(sizes)]
    found = list(chunks(iter(records), most, characters))
    assert [record for chunk in found for record in chunk] == records
    for chunk in found:
        assert 0 < len(chunk) <= most
        assert sum(len(record.values[0]) for record in chunk[:-1]) < characters
