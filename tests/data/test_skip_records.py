"""`skip` leaves out records by number: in every format, over all files, and in the cache key."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config.data import Corpus, DataConfig
from clearhead.data.build_datasets import raw_records, skip_records
from clearhead.data.formats import ANSWERS, PAIR, TAGS, TEXT, TRANSLATION, Location, Record
from clearhead.errors import ConfigError, UserError
from clearhead.evaluate.labeled import records
from tests.corpora import corpus as corpus_path
from tests.data.helpers import config, prepared, write

LABELED = (*TEXT, "label")
QUESTIONS = [{"id": str(n), "question": f"q{n}", "answers": []} for n in range(1, 6)]
SQUAD = {"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": QUESTIONS}]}]}
# For each format, a file with five records (headers and blank lines are not), columns, settings and first values
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
    """Return which of `count` numbered records remain."""
    corpus = Corpus(files=("x",), skip=tuple(skip))
    return [r.values[0] for r in skip_records((Record(Location("x", n), (n,)) for n in range(1, count + 1)), corpus)]


@pytest.mark.parametrize("format", FILES)
def test_skip_works_in_every_format(format: str, tmp_path: Path) -> None:
    text, columns, settings, first = FILES[format]
    (tmp_path / "file").write_text(text, encoding="utf-8")
    corpus = {"format": format, "files": [str(tmp_path / "file")], **settings}
    assert [record.values[0] for record in raw_records(Corpus.build(corpus), columns)] == first
    all_records = list(raw_records(Corpus.build(corpus), columns))
    remaining = list(raw_records(Corpus.build(corpus | {"skip": [[2, 3], [5, 5]]}), columns))
    assert remaining == [all_records[0], all_records[3]], "locations are unchanged"
    with pytest.raises(UserError, match=r"skip: from 4 to 6, but .*file has 5 records; lower it"):
        list(raw_records(Corpus.build(corpus | {"skip": [[4, 6], [1, 2]]}), columns))


def test_records_are_counted_over_all_files_and_pairs_of_files(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", "abc"), write(tmp_path / "two", "def")
    corpus = Corpus.build({"files": [one, two], "skip": [[3, 4]]})
    assert [record.values[0] for record in raw_records(corpus, TEXT)] == list("abef")
    corpus = Corpus.build({"format": "parallel", "files": [one, two, two, one], "skip": [[3, 5]]})
    assert [record.values for record in raw_records(corpus, TRANSLATION)] == [("a", "d"), ("b", "e"), ("f", "c")]


def test_skip_works_for_synthetic_data() -> None:
    base = {"format": "symbols", "count": 5}
    all_records = list(raw_records(Corpus.build(base), TRANSLATION))
    assert list(raw_records(Corpus.build(base | {"skip": [[1, 4]]}), TRANSLATION)) == all_records[4:]
    with pytest.raises(UserError, match="skip: from 6 to 6, but the symbols corpus has 5 records"):
        list(raw_records(Corpus.build(base | {"skip": [[6, 6]]}), TRANSLATION))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=8))
def test_ranges_may_overlap_in_any_order(drawn: list[tuple[int, int]]) -> None:
    skip = [(first, first + more) for first, more in drawn] or [(1, 1)]
    assert numbers(skip, 40) == [n for n in range(1, 41) if not any(first <= n <= last for first, last in skip)]


def test_skipped_records_are_not_tokenized_nor_labels_nor_evaluated(tmp_path: Path) -> None:
    rows = [f"text {n}\t{'odd' if n == 3 else 'xy'[n % 2]}" for n in range(1, 9)]
    plain = {"format": "tsv", "files": write(tmp_path / "rows", rows)}
    data = prepared(tmp_path, "classification", train=plain, valid=plain)
    assert (data.train.num_samples(0), data.labels) == (8, ("odd", "x", "y"))
    fewer = plain | {"skip": [[3, 4]]}
    data = prepared(tmp_path, "classification", train=fewer, valid=plain | {"skip": [[2, 8]]})
    assert data.valid is not None
    assert (data.train.num_samples(0), data.valid.num_samples(0), data.labels) == (6, 1, ("x", "y"))
    settings = config(tmp_path, "classification", train=fewer)
    assert len(list(records(settings, settings.train))) == 6


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ([[5, 4]], r"train\.0: skip: the range from 5 to 4 ends before it starts; swap the two numbers"),
        ([[0, 4]], r"train\.0\.skip\.0\.0: 0 is too small; use 1 or more"),
        ([[1, 1 << 41]], r"train\.0\.skip\.0\.1: \d+ is too large"),
        ([[1, 2.5]], r"train\.0\.skip\.0\.1: 2\.5 is not a whole number"),
        ([[1, True]], r"train\.0\.skip\.0\.1: True is not a whole number"),
        ([3, 4], r"train\.0\.skip: \[3, 4\] is not a list of ranges; .*like \[\[2451, 3450\]\]"),
        ([[1, 2, 3]], r"train\.0\.skip: \[\[1, 2, 3\]\] is not a list of ranges"),
        ("3-4", r"train\.0\.skip: '3-4' is not a list of ranges"),
        ([[n, n] for n in range(1, 1002)], r"train\.0\.skip: 1,001 ranges are too many; give at most 1,000"),
    ],
)
def test_a_bad_range_gives_one_line(skip: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig.build({"task": "language-model", "train": {"files": "x", "skip": skip}})


def test_skipping_all_records_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "file", ["a\t1", "b\t2", "c\t3"])
    with pytest.raises(UserError, match=r"no samples in .*file \(left out: all, by skip\)"):
        prepared(tmp_path, "regression", train={"format": "tsv", "files": file, "skip": [[1, 3]]})


def test_a_thousand_ranges_round_trip() -> None:
    skip = [[n, n] for n in range(1, 1001)]
    made = DataConfig.build({"task": "language-model", "train": {"files": "x", "skip": skip}})
    assert made.model_dump(mode="json")["train"][0]["skip"] == skip
    assert DataConfig.build(made.model_dump(mode="json")) == made


def test_stsb_for_mrpc_has_no_sentence_of_mrpc() -> None:
    """All training sentences of MRPC in STS-B are in the skipped ranges."""
    from clearhead.config.recipe import load_recipe

    for name in ("mrpc/msr_paraphrase_train.txt.gz", "stsb/stsb-en-train.csv.gz", "stsb/stsb-en-dev.csv.gz"):
        corpus_path(name)

    def letters_of(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    mrpc, made = load_recipe("mrpc-after-stsb").data, load_recipe("stsb-for-mrpc").data
    mrpc_records = raw_records(mrpc.train[0], (*PAIR, "label"))
    mrpc_texts = {letters_of(text) for record in mrpc_records for text in record.values[:2]}
    for (corpus,), size, min_skipped in ((made.train, 4749, 500), (made.valid, 1250, 100)):
        pairs = [record.values[:2] for record in raw_records(corpus, (*PAIR, "label"))]
        assert len(pairs) == size
        assert not [pair for pair in pairs if {*map(letters_of, pair)} & mrpc_texts]
        all_records = raw_records(corpus.model_copy(update={"skip": ()}), (*PAIR, "label"))
        assert sum(bool({*map(letters_of, record.values[:2])} & mrpc_texts) for record in all_records) > min_skipped
