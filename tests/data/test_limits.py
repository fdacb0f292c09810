"""Files made to take far more memory or time than their size are refused, or read in bounded pieces."""
# ruff: noqa: E501

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.data import cleaning, formats, prepare, tasks
from clearhead.data.formats import Location, Record
from clearhead.data.tasks import split_documents, split_long_texts
from clearhead.errors import ConfigError, UserError
from tests.data.helpers import config, leftovers, prepared, tokenizer


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (formats, "MAX_LINE_BYTES", 1000),
        (formats, "MAX_RECORD_BYTES", 5000),
        (formats, "MAX_TEXT_CHARS", 2000),
        (cleaning, "MAX_TEXT_CHARS", 2000),
        (tasks, "MAX_TEXT_CHARS", 2000),
        (formats, "CONTEXT_ALLOWANCE", 2000),
    ):
        monkeypatch.setattr(module, name, value)
    defaults = formats._lines.__defaults__
    monkeypatch.setattr(formats._lines, "__defaults__", (1000,))
    assert defaults != (1000,)


def squad(context: str, questions: int) -> str:
    qas = [{"question": "w?", "id": str(n), "answers": []} for n in range(questions)]
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": qas}]}]})


CASES: list[tuple[str, str, str, str]] = [  # task, format, content, message
    ("language-model", "text", "fine\n" + "x" * 1001, "line 2: longer than 1,000 bytes; split it into lines"),
    ("translation", "tsv", "a\tb\nc\t" + "d" * 5000, "line 2: longer than 5,000 bytes; split it"),
    ("translation", "csv", "a,b\n" + '"x\n",' * 2000, "line 1252: a row of more than 5,000 characters; check the quot"),
    ("classification", "tsv", "x" * 2500 + "\tpos\n", "line 1: a text of 2,500 characters; at most 2,000 are tokenized"),
    ("classification", "jsonl", f'{{"text": "{"x" * 2500}", "label": "pos"}}\n', "line 1: a text of 2,500 characters"),
    ("language-model", "jsonl", f'{{"text": "{"x" * 2500}"}}\n', "line 1: a text of 2,500 characters; .* split it"),
    ("tagging", "conll", "EU B-ORG\n" * 300, "line 223: a sentence of more than 2,000 characters; put a blank line"),
    ("answering", "squad", squad("x" * 1900, 300), "question 69: contexts repeated for each question have 8 times"),
    ("classification", "jsonl", f'{{"text": "a", "label": {"[" * 101 + "]" * 101}}}\n', "nested more than 100 deep.; write"),
]  # fmt: skip


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(("task", "format", "content", "message"), CASES)
def test_an_endless_record_names_line_limit_and_fix(
    task: str, format: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text(content)
    corpus = {"format": format, "files": str(tmp_path / "file")}
    labels = {"classification": ["pos"], "tagging": ["B-ORG"]}.get(task, [])
    with pytest.raises(UserError, match=message) as caught:
        prepare(config(tmp_path, task, train=corpus, labels=labels, max_length=64, stride=2), [tokenizer()])
    assert "\n" not in str(caught.value)
    assert not leftovers(tmp_path / "cache")


@pytest.mark.usefixtures("small_limits")
def test_normalization_cannot_make_a_text_longer_than_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("\ufdfa" * 300)  # NFKC makes 18 characters of it
    chosen = config(tmp_path, "language-model", train={"files": str(tmp_path / "file")}, normalize="nfkc")
    with pytest.raises(UserError, match="line 1: a text of 5,400 characters"):
        prepare(chosen, [tokenizer()])


@pytest.mark.parametrize("task", ["language-model", "masked-language-model"])
def test_a_long_document_of_json_lines_gives_the_rows_of_the_whole(task: str, tmp_path: Path) -> None:
    text = "\n".join(f"line {n} of a long document" for n in range(9000))
    path = tmp_path / "file"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in (text, "short", text[:100])))
    corpus = {"format": "jsonl", "files": str(path)}
    split = prepared(tmp_path, task, train=corpus, max_length=32).train.stores[0]
    records = [Record(Location("file", n), (each,)) for n, each in enumerate((text, "short", text[:100]))]
    assert len(list(split_long_texts(iter(records)))) > 4
    whole = tmp_path / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.data.build_datasets.split_long_texts", lambda records: records)
        unsplit = prepared(whole, task, train=corpus, max_length=32).train.stores[0]
    assert split.fields["ids"][0].tolist() == unsplit.fields["ids"][0].tolist()


@pytest.mark.usefixtures("small_limits")
def test_a_document_without_a_place_to_split_is_split_at_the_limit() -> None:
    def lines() -> Iterator[Record]:
        for _ in range(1000):
            yield Record(Location("file", 1), (" indented",))
            yield Record(Location("file", 1), ("",))

    pieces = [record.values for record in split_documents(lines(), "file", max_chars=100)]
    assert all(len(text) <= 2001 for text, *_ in pieces)
    assert "".join(text for text, *_ in pieces) == " indented\n\n" * 999 + " indented\n"
    assert [opens for _, opens, _ in pieces] == [True] + [False] * (len(pieces) - 1)


def test_many_labels_and_columns_take_linear_time(tmp_path: Path) -> None:
    start = time.process_time()
    labels = [f"L-{n}" for n in range(10_000)]
    (tmp_path / "file").write_text("".join(f"w {labels[-n % 3 - 1]}\n" + "\n" * (n % 9 == 8) for n in range(30_000)))
    prepared(tmp_path, "tagging", train={"format": "conll", "files": str(tmp_path / "file")}, labels=labels)
    (tmp_path / "wide").write_text("\t".join(f"column {n}" for n in range(80_000)) + "\n")
    corpus = {"format": "tsv", "files": str(tmp_path / "wide"), "columns": {"source": "x" * 10_000, "target": "y"}}
    with pytest.raises(UserError, match="no column 'x"):
        prepared(tmp_path, "translation", train=corpus)
    assert time.process_time() - start < 6


def test_thousands_of_unknown_settings_give_a_short_error_at_once() -> None:
    start = time.process_time()
    settings: dict[str, Any] = {f"unknown_{n}": n for n in range(50_000)}
    with pytest.raises(ConfigError, match="and 49,980 more errors") as caught:
        config(Path("unused"), "translation", **settings)
    assert len(str(caught.value).splitlines()) == 21
    assert time.process_time() - start < 3
