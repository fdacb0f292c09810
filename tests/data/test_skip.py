"""Records that a corpus leaves out: in every format, over all its files, and never from a cache that has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config.data import Corpus, DataConfig
from clearhead.data.formats import ANSWERS, PAIR, TAGS, TEXT, TRANSLATION, Place, Record
from clearhead.data.prepare import raw_records, without
from clearhead.errors import ConfigError, UserError
from clearhead.evaluate.labeled import records
from tests.corpora import corpus as real
from tests.data.helpers import config, prepared, write

LABELED = (*TEXT, "label")
QUESTIONS = [{"id": str(n), "question": f"q{n}", "answers": []} for n in range(1, 6)]
SQUAD = {"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": QUESTIONS}]}]}
# A file of five records in each format, blank lines and headers being none, and what each record begins with
FILES: dict[str, tuple[str, tuple[str, ...], dict[str, Any], list[Any]]] = {
    "text": ("a\n\nc\nd\ne\n", TEXT, {}, ["a", "", "c", "d", "e"]),
    "tsv": ("text\tlabel\na\t1\nb\t1\nc\t1\nd\t1\ne\t1\n", LABELED, {"header": True}, list("abcde")),
    "csv": ('a,1\n\n"b\nb",1\nc,1\nd,1\ne,1\n', LABELED, {}, ["a", "b\nb", "c", "d", "e"]),
    "jsonl": ("\n".join(json.dumps({"text": x, "label": 1}) + "\n" for x in "abcde"), LABELED, {}, list("abcde")),
    "conll": ("\n".join(f"{x} O\n" for x in "abcde"), TAGS, {}, [[x] for x in "abcde"]),
    "squad": (json.dumps(SQUAD), ANSWERS, {}, ["c"] * 5),
    "trec": ("".join(f"A:b {x}\n" for x in "abcde"), LABELED, {}, list("abcde")),
}


def numbers(skip: list[tuple[int, int]], count: int) -> list[int]:
    """Which of so many records are left."""
    corpus = Corpus(files=("x",), skip=tuple(skip))
    return [r.values[0] for r in without((Record(Place("x", n), (n,)) for n in range(1, count + 1)), corpus)]


@pytest.mark.parametrize("format", FILES)
def test_every_format_leaves_out_the_records_that_are_named(format: str, tmp_path: Path) -> None:
    text, columns, settings, first = FILES[format]
    (tmp_path / "file").write_text(text, encoding="utf-8")
    corpus = {"format": format, "files": [str(tmp_path / "file")], **settings}
    assert [record.values[0] for record in raw_records(Corpus.build(corpus), columns)] == first
    whole = list(raw_records(Corpus.build(corpus), columns))
    left = list(raw_records(Corpus.build(corpus | {"skip": [[2, 3], [5, 5]]}), columns))
    assert left == [whole[0], whole[3]], "with the places that they had"
    with pytest.raises(UserError, match=r"skip: from 4 to 6, but .*file has 5 records; lower it"):
        list(raw_records(Corpus.build(corpus | {"skip": [[4, 6], [1, 2]]}), columns))


def test_records_are_counted_over_all_files_and_pairs_of_files(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", "abc"), write(tmp_path / "two", "def")
    corpus = Corpus.build({"files": [one, two], "skip": [[3, 4]]})
    assert [record.values[0] for record in raw_records(corpus, TEXT)] == list("abef")
    corpus = Corpus.build({"format": "parallel", "files": [one, two, two, one], "skip": [[3, 5]]})
    assert [record.values for record in raw_records(corpus, TRANSLATION)] == [("a", "d"), ("b", "e"), ("f", "c")]


def test_made_sentences_can_be_left_out_too() -> None:
    base = {"format": "symbols", "count": 5}
    whole = list(raw_records(Corpus.build(base), TRANSLATION))
    assert list(raw_records(Corpus.build(base | {"skip": [[1, 4]]}), TRANSLATION)) == whole[4:]
    with pytest.raises(UserError, match="skip: from 6 to 6, but the symbols corpus has 5 records"):
        list(raw_records(Corpus.build(base | {"skip": [[6, 6]]}), TRANSLATION))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=8))
def test_ranges_may_overlap_and_stand_in_any_order(drawn: list[tuple[int, int]]) -> None:
    skip = [(first, first + more) for first, more in drawn] or [(1, 1)]
    assert numbers(skip, 40) == [n for n in range(1, 41) if not any(first <= n <= last for first, last in skip)]


def test_what_is_left_out_is_neither_tokenized_nor_a_label_nor_scored(tmp_path: Path) -> None:
    rows = [f"text {n}\t{'odd' if n == 3 else 'xy'[n % 2]}" for n in range(1, 9)]
    plain = {"format": "tsv", "files": write(tmp_path / "rows", rows)}
    data = prepared(tmp_path, "classification", train=plain, valid=plain)
    assert (data.train.size(0), data.labels) == (8, ("odd", "x", "y"))
    less = plain | {"skip": [[3, 4]]}
    data = prepared(tmp_path, "classification", train=less, valid=plain | {"skip": [[2, 8]]})
    assert data.valid is not None
    assert (data.train.size(0), data.valid.size(0), data.labels) == (6, 1, ("x", "y"))
    settings = config(tmp_path, "classification", train=less)
    assert len(list(records(settings, settings.train))) == 6


@pytest.mark.parametrize(
    ("skip", "said"),
    [
        ([[5, 4]], r"train\.0: skip: the range from 5 to 4 ends before it begins; turn it round"),
        ([[0, 4]], r"train\.0\.skip\.0\.0: 0 is too small; use 1 or more"),
        ([[1, 1 << 41]], r"train\.0\.skip\.0\.1: \d+ is too large"),
        ([[1, 2.5]], r"train\.0\.skip\.0\.1: 2\.5 is not a whole number"),
        ([[1, True]], r"train\.0\.skip\.0\.1: True is not a whole number"),
        ([3, 4], r"train\.0\.skip: \[3, 4\] is no list of ranges; .*like \[\[2451, 3450\]\]"),
        ([[1, 2, 3]], r"train\.0\.skip: \[\[1, 2, 3\]\] is no list of ranges"),
        ("3-4", r"train\.0\.skip: '3-4' is no list of ranges"),
        ([[n, n] for n in range(1, 1002)], r"train\.0\.skip: 1,001 ranges; give at most 1,000"),
    ],
)
def test_a_wrong_range_is_said_in_a_line(skip: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DataConfig.build({"task": "language-model", "train": {"files": "x", "skip": skip}})


def test_where_all_is_left_out_that_is_the_reason(tmp_path: Path) -> None:
    file = write(tmp_path / "file", ["a\t1", "b\t2", "c\t3"])
    with pytest.raises(UserError, match=r"no samples in .*file \(left out: all, by skip\)"):
        prepared(tmp_path, "regression", train={"format": "tsv", "files": file, "skip": [[1, 3]]})


def test_a_thousand_ranges_are_kept_as_they_were_written() -> None:
    skip = [[n, n] for n in range(1, 1001)]
    made = DataConfig.build({"task": "language-model", "train": {"files": "x", "skip": skip}})
    assert made.model_dump(mode="json")["train"][0]["skip"] == skip
    assert DataConfig.build(made.model_dump(mode="json")) == made


def test_stsb_for_mrpc_has_no_sentence_of_mrpc() -> None:
    """MRPC's training rows, which can be looked for here, are all in the blocks that are left out."""
    from clearhead.config.recipe import load_recipe

    for name in ("mrpc/msr_paraphrase_train.txt.gz", "stsb/stsb-en-train.csv.gz", "stsb/stsb-en-dev.csv.gz"):
        real(name)

    def bare(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    mrpc, made = load_recipe("mrpc-after-stsb").data, load_recipe("stsb-for-mrpc").data
    known = {bare(text) for record in raw_records(mrpc.train[0], (*PAIR, "label")) for text in record.values[:2]}
    for (corpus,), size, taken in ((made.train, 4749, 500), (made.valid, 1250, 100)):
        pairs = [record.values[:2] for record in raw_records(corpus, (*PAIR, "label"))]
        assert len(pairs) == size
        assert not [pair for pair in pairs if {*map(bare, pair)} & known]
        whole = raw_records(corpus.model_copy(update={"skip": ()}), (*PAIR, "label"))
        assert sum(bool({*map(bare, record.values[:2])} & known) for record in whole) > taken
