"""Translation and language modeling: the content of batches, and windows that cover the text exactly."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import IGNORED, Dataset
from clearhead.data.formats import Location, Record
from clearhead.data.tasks import split_documents
from clearhead.text import Kind, Tokenizer, train
from tests.data.helpers import LINES, dataset, loader, pairs, prepared, samples_of, sentences, tokenizer, write


@pytest.mark.parametrize("packed", [False, True])
def test_translation_labels_are_the_target_shifted_by_one(packed: bool) -> None:
    rows, tokens = pairs(20), tokenizer()
    batch = dataset("translation", rows, packed=packed).batch(np.array([4, 0, 11]), 0, 0)
    for side, (number, source, target, labels) in enumerate(
        zip((4, 0, 11), *(samples_of(batch, name) for name in ("source", "target", "labels")), strict=True)
    ):
        assert source == [*tokens.encode(rows[number][0]), tokens.id("end")], side
        assert target == [tokens.id("begin"), *tokens.encode(rows[number][1])]
        assert labels == [*tokens.encode(rows[number][1]), tokens.id("end")]
    num_tokens = sum(len(row) for name in ("source", "target") for row in samples_of(batch, name))
    assert batch.num_tokens == num_tokens
    assert batch.padded_tokens == (
        num_tokens if packed else sum(3 * batch[name].shape[1] for name in ("source", "target"))
    )
    if not packed:
        for name, pad_value in (("source", tokens.id("pad")), ("target", tokens.id("pad")), ("labels", IGNORED)):
            lengths = batch[("source" if name == "source" else "target") + "_lengths"].tolist()
            for row, length in zip(batch[name].tolist(), lengths, strict=True):
                assert row[length:] == [pad_value] * (len(row) - length)


def test_source_and_target_use_their_own_tokenizers(tmp_path: Path) -> None:
    from clearhead.data import from_records
    from tests.data.helpers import config

    source, target = tokenizer("char"), tokenizer("word", 60)
    data = from_records(config(tmp_path, "translation"), [("the cat", "the cat sat")], [source, target])
    batch = data.batch(np.array([0]), 0, 0)
    assert batch["source"][0].tolist() == [*source.encode("the cat"), source.id("end")]
    assert batch["target"][0].tolist() == [target.id("begin"), *target.encode("the cat sat")]
    assert batch["labels"][0].tolist() == [*target.encode("the cat sat"), target.id("end")]


def windows(data: Dataset) -> list[Any]:
    """Return the batches of one epoch in order."""
    steps = loader(data, 3 * data.task.config.max_length, shuffle=False, workers=0)
    return [step.batches[0] for step in steps]


texts = st.lists(st.sampled_from([*LINES, "a", "b c"]), min_size=1, max_size=8)


@given(texts, st.integers(5, 40))
def test_windows_cover_the_stream_and_labels_are_the_next_tokens(lines: list[str], max_length: int) -> None:
    tokens = tokenizer()
    stream = [n for line in lines for n in (tokens.id("begin"), *tokens.encode(line), tokens.id("end"))]
    data = dataset("language-model", [(line,) for line in lines], max_length=max_length)
    inputs, labels = list[int](), list[int]()
    for batch in windows(data):
        assert batch["ids"].shape[1] == max_length
        labeled = batch["labels"] != IGNORED
        assert batch.num_tokens == int(labeled.sum())
        inputs += batch["ids"][labeled].tolist()
        labels += batch["labels"][labeled].tolist()
    assert inputs == stream[:-1]
    assert labels == stream[1:]


@given(texts, st.integers(5, 40))
def test_isolated_documents_are_never_predicted_from_another(lines: list[str], max_length: int) -> None:
    tokens = tokenizer()
    data = dataset("language-model", [(line,) for line in lines], max_length=max_length, isolate_documents=True)
    begin, stream = (
        tokens.id("begin"),
        [n for line in lines for n in (tokens.id("begin"), *tokens.encode(line), tokens.id("end"))],
    )
    offset = 0
    for batch in windows(data):
        ids, labels = batch["ids"][0].tolist(), batch["labels"][0].tolist()
        documents = batch.documents["ids"]
        assert len(ids) == len(labels) == documents.total == int(documents.lengths.sum())
        starts = {0, *np.cumsum(documents.lengths.tolist())[:-1].tolist()}
        size = min(len(ids), len(stream) - 1 - offset)
        assert ids[:size] == stream[offset : offset + size]
        expected_starts = {n for n in range(size) if n % max_length == 0 or ids[n] == begin}
        assert {start for start in starts if start < size} == expected_starts
        following = stream[offset + 1 : offset + 1 + size]
        assert labels == [IGNORED if n == begin else n for n in following] + [IGNORED] * (len(ids) - size)
        offset += size
    assert offset == len(stream) - 1


def test_the_first_window_starts_at_another_offset_in_every_epoch() -> None:
    data = dataset("language-model", [(line,) for line in sentences(50)], max_length=32)
    store, stream = data.stores[0], data.stores[0].fields["ids"][0].tolist()
    firsts = set()
    for epoch in range(12):
        batch = data.batch(np.arange(data.num_samples(epoch)), epoch, 0)
        first = data.task._range(store, epoch)[0]  # type: ignore[attr-defined]
        assert first < 32
        labeled = batch["labels"] != IGNORED
        assert batch["ids"][labeled].tolist() == stream[first:-1]
        assert batch["labels"][labeled].tolist() == stream[first + 1 :]
        firsts.add(first)
    assert len(firsts) > 6


def test_the_end_of_a_text_is_held_out(tmp_path: Path) -> None:
    file = write(tmp_path / "text", sentences(200))
    data = prepared(tmp_path, "language-model", train={"files": file}, held_out=0.1, max_length=16)
    assert data.valid is not None
    stream = data.train.stores[0].fields["ids"][0].tolist()
    parts = []
    for part in (data.train, data.valid):
        batch = part.batch(np.arange(part.num_samples(0)), 0, 0)
        labeled = batch["labels"] != IGNORED
        parts.append([*batch["ids"][labeled].tolist(), int(batch["labels"][labeled][-1])])
    assert parts[0] + parts[1] == stream
    assert len(parts[1]) == pytest.approx(0.1 * len(stream), abs=1)
    for epoch in range(1, 5):  # also in later epochs, whose windows start elsewhere
        batch = data.train.batch(np.arange(data.train.num_samples(epoch)), epoch, 0)
        assert batch["ids"][batch["labels"] != IGNORED].tolist()[-16:] == parts[0][-17:-1]


def lines_of(*files: list[str]) -> list[Record]:
    return [
        Record(Location(f"file{n}", k), (line,)) for n, lines in enumerate(files) for k, line in enumerate(lines, 1)
    ]


def test_a_document_is_a_line_a_paragraph_or_a_file() -> None:
    files = ["a", "b", "", " ", "c"], ["d", "", "e"]
    documents = {
        unit: [r.values for r in split_documents(iter(lines_of(*files)), unit)]
        for unit in ("line", "paragraph", "file")
    }
    assert documents["line"] == [(text, True, True) for text in "abcde"]
    assert documents["paragraph"] == [(text, True, True) for text in ("a\nb", "c", "d", "e")]
    assert documents["file"] == [("a\nb\n\n \nc", True, True), ("d\n\ne", True, True)]
    assert not list(split_documents(iter(lines_of(["", " "])), "file"))


def test_an_article_stands_under_a_heading_of_the_first_level() -> None:
    files = ["before", " = Lobster = ", " = = Claws = = ", "a = b"], ["# One", "## Part", "#tag", "", "# Two", "end"]
    documents = [r.values[0] for r in split_documents(iter(lines_of(*files)), "heading")]
    assert documents == ["before", " = Lobster = \n = = Claws = = \na = b", "# One\n## Part\n#tag\n", "# Two\nend"]


line = st.text(st.sampled_from("ab# c.,'\t\n\u3000é猫🐈1"), max_size=12).map(lambda text: text.replace("\n", ""))


@given(st.lists(line, max_size=30), st.integers(1, 40), st.sampled_from(["file", "paragraph", "heading"]))
def test_pieces_of_a_long_document_have_the_tokens_of_the_whole(lines: list[str], size: int, unit: str) -> None:
    wholes = [r.values[0] for r in split_documents(iter(lines_of(lines)), unit)]
    pieces = [r.values for r in split_documents(iter(lines_of(lines)), unit, size)]
    joined, closed = list[str](), True
    for text, opens, closes in pieces:
        assert opens == closed
        joined.append(text) if opens else joined.append(joined.pop() + text)
        closed = closes
    assert joined == wholes
    for tokens in (tokenizer("char"), tokenizer(), spacious()):
        ids = [n for text, *_ in pieces for n in tokens.encode(text)]
        assert ids == [n for text in wholes for n in tokens.encode(text)]


@cache
def spacious() -> Tokenizer:
    """A tokenizer that joins whatever spaces it may."""
    return train(["a \n b\n\nc\t\n \nd  e\u3000\n\u3000f\n\n\n g"] * 9, "byte-bpe", 285)


@pytest.mark.parametrize("kind", ["byte-bpe", "char"])
@pytest.mark.parametrize("task", ["language-model", "masked-language-model"])
def test_a_document_in_pieces_gives_the_rows_of_the_whole(kind: Kind, task: str) -> None:
    records = lines_of(sentences(60), sentences(7), sentences(90)[::-1])
    made = []
    for size in (1 << 16, 50):
        data = dataset(task, [], kind, max_length=23)
        rows = data.task.encode_records(list(split_documents(iter(records), "file", size)), Counter())
        made.append([number for row in rows for number in row["ids"]] if task == "language-model" else rows)
    assert made[0] == made[1]
