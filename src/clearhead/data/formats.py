"""Files to records: parallel lines, TSV, CSV, JSON lines, plain text, CoNLL, SQuAD, TREC; all of them gzip or not.

A record is a tuple of values, one for each column that the task asks for, with the place it came from, so that
whatever is wrong with it can be said with file and line.
"""

import csv
import json
import os
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.config.data import Corpus
from clearhead.config.settings import nearest
from clearhead.errors import UserError
from clearhead.files import read_lines


class Place(NamedTuple):
    """Where a record comes from."""

    file: str
    number: int | str
    unit: str = "line"
    lines: bool = False  # whether every item of the record has a line of its own, as tokens do in CoNLL

    def at(self, item: int) -> "Place":
        """The place of one item of the record."""
        return self._replace(number=self.number + item) if self.lines and isinstance(self.number, int) else self

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


class Record(NamedTuple):
    """The values of a task's columns, and where they stood."""

    place: Place
    values: tuple[Any, ...]
    group: str = ""  # what stays together when a part is held out, where that is not the first value


# What each task reads, in the order of a record's values.
TRANSLATION, TEXT, PAIR = ("source", "target"), ("text",), ("text", "second")
TAGS, ANSWERS = ("tokens", "tags"), ("context", "question", "answer", "start")
ALL_ANSWERS = (*ANSWERS, "references")  # for scores: every answer that counts as right
TEXTS = ("source", "target", "text", "second", "tokens", "context", "question")  # what is cleaned and tokenized

DEFAULTS = {"source": 1, "target": 2, "text": 1, "second": 2, "tokens": 1, "tags": -1}  # "label" stands last


def find(name: str, published: str = "") -> Path:
    """The file as named, or under CLEARHEAD_DATA, or under ./data; a missing one is named with what to do."""
    if name == "-":
        raise UserError("files: standard input can be read only once; write it to a file first")
    root = os.environ.get("CLEARHEAD_DATA", "../shared/data")
    for path in (Path(name), Path(root) / name, Path("data") / name):
        if os.path.exists(path):  # Path.exists would raise where a folder may not be searched
            return path
    told = f"put it under data/{name}, or set CLEARHEAD_DATA to the folder that has {name}"
    if Path(name).is_absolute():
        told = "check the path"
    raise UserError(f"{name} does not exist; {told}" + (f"; it is published at {published}" if published else ""))


def paths(corpus: Corpus, published: str = "") -> list[Path]:
    """The files of a corpus; a folder stands for all files in it, by name."""
    found: list[Path] = []
    for name in corpus.files:
        path = find(name, published)
        if path.is_dir():
            inside = sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
            if not inside:
                raise UserError(f"{path} is an empty folder; give a file, or a folder with files")
            found += inside
        else:
            found.append(path)
    return found


def read(corpus: Corpus, columns: tuple[str, ...], published: str = "") -> Iterator[Record]:
    """The records of a corpus of files, with the values of `columns`."""
    files = paths(corpus, published)
    wrong = set(corpus.columns) - set(columns)
    if wrong:
        name = sorted(wrong)[0]
        raise UserError(f"columns: this task reads no column {name!r}{nearest(name, list(columns))}")
    if corpus.format == "parallel":
        if len(columns) != 2:
            raise UserError(f"format: parallel files hold a source and a target; this task reads {', '.join(columns)}")
        if len(files) % 2:
            raise UserError(
                f"files: the folders hold {len(files)} files; parallel needs a source and a target, in turn"
            )
        groups: list[Iterable[Record]] = [_parallel(*pair) for pair in zip(files[::2], files[1::2], strict=True)]
    else:
        groups = [READERS[corpus.format](path, corpus, columns) for path in files]
    for path, group in zip(files[:: 2 if corpus.format == "parallel" else 1], groups, strict=True):
        empty = True
        for record in group:
            empty = False
            yield _renamed(record, columns, corpus.rename) if corpus.rename else record
        if empty:
            raise UserError(f"{path} is empty; give a file with content")


def _renamed(record: Record, columns: tuple[str, ...], names: dict[str, str]) -> Record:
    """The record with its label, or its tags, as they are called elsewhere."""
    values = list(record.values)
    for place, column in enumerate(columns):
        if column == "label":
            values[place] = names.get(str(values[place]), values[place])
        elif column == "tags" and isinstance(values[place], list):
            values[place] = [names.get(str(tag), tag) for tag in values[place]]
    return record._replace(values=tuple(values))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers."""
    return enumerate(read_lines(path), start=1)


def _parallel(source: Path, target: Path) -> Iterator[Record]:
    """Line n of one file is the translation of line n of the other."""
    lines = zip_longest(_lines(source), _lines(target))
    for number, (ours, theirs) in enumerate(lines, start=1):
        if ours is None or theirs is None:
            rest = number + sum(1 for _ in lines)
            counts = (number - 1, rest) if ours is None else (rest, number - 1)
            raise UserError(
                f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}: line {number} of one has no "
                "counterpart; parallel files need the same number of lines"
            )
        yield Record(Place(str(source), number), (ours[1], theirs[1]))


def _text(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    if columns != TEXT:
        raise UserError(f"format: plain text has no columns; this task reads {', '.join(columns)}; use tsv or jsonl")
    return (Record(Place(str(path), number), (line,)) for number, line in _lines(path))


def _table(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """TSV without quoting (a quotation mark is one), CSV with it."""
    if columns in (TAGS, ANSWERS, ALL_ANSWERS):
        raise UserError(
            f"format: {corpus.format} holds a text a column; this task reads {', '.join(columns[:4])}; use jsonl"
        )
    if corpus.format == "csv":
        reader = csv.reader((line + "\n" for _, line in _lines(path)), strict=True)
        rows = ((reader.line_num, row) for row in reader)
    else:
        rows = ((number, line.split("\t")) for number, line in _lines(path))
    try:
        wanted = {name: corpus.columns.get(name, DEFAULTS.get(name, len(columns))) for name in columns}
        where = None
        if corpus.header or any(isinstance(each, str) for each in wanted.values()):
            number, header = next(rows, (0, []))
            if not number:
                return
            where = [_named_column(path, header, each) for each in wanted.values()]
        places = where or [each - 1 if isinstance(each, int) and each > 0 else int(each) for each in wanted.values()]
        least = max(place + 1 if place >= 0 else -place for place in places)
        for number, row in rows:
            if len(row) < least:
                if not any(row):  # a blank line, as at the end of many files
                    continue
                kind, other, sign = ("commas", "tsv", "\t") if corpus.format == "csv" else ("tabs", "csv", ",")
                looks = f"; if it is {other}, say so, and which columns" if any(sign in each for each in row) else ""
                raise UserError(
                    f"{path}, line {number}: only {len(row)} columns, but {least} are needed to find "
                    f"{' and '.join(columns)}; separate columns by {kind}, or set columns{looks}"
                )
            yield Record(Place(str(path), number), tuple(row[place] for place in places))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}; check the quotation marks") from None


def _named_column(path: Path, header: list[str], name: int | str) -> int:
    if isinstance(name, int):
        return name - 1 if name > 0 else len(header) + name
    if name not in header:
        raise UserError(
            f"{path}, line 1: no column {name!r}{nearest(name, header)}; without a header, give columns by number"
        )
    return header.index(name)


def _json_lines(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    names = [str(corpus.columns.get(name, name)) for name in columns if name != "references"]
    for number, line in _lines(path):
        if not line.strip():
            continue
        place = Place(str(path), number)
        found = _parsed(line, place, "write one object a line")
        if not isinstance(found, dict):
            raise UserError(f"{place}: {type(found).__name__}, not an object; write one object a line")
        for name in names:
            if name not in found:
                raise UserError(f"{place}: no key {name!r}{nearest(name, list(found))}")
        values = [found[name] for name in names]
        yield Record(place, (*values, [values[2]]) if columns == ALL_ANSWERS else tuple(values))


def _conll(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """A token and its tag a line, a blank line between sentences."""
    if columns != TAGS:
        raise UserError(f"format: conll holds tokens and tags; this task reads {', '.join(columns)}")
    token, tag = (corpus.columns.get(name, DEFAULTS[name]) for name in TAGS)
    if isinstance(token, str) or isinstance(tag, str):
        raise UserError("columns: conll has no header; give the columns of tokens and tags by number, like 1 and -1")
    tokens: list[str] = []
    tags: list[str] = []
    first = 1
    for number, line in _lines(path):
        parts = line.rstrip("\t ").split("\t") if "\t" in line else line.split()
        if not line.strip() or parts[0] == "-DOCSTART-":
            if tokens:
                yield Record(Place(str(path), first, lines=True), (tokens, tags))
            tokens, tags, first = [], [], number + 1
            continue
        if len(parts) < 2 or not all(part.strip(" ") for part in parts):  # other spaces are tokens here and there
            raise UserError(f"{path}, line {number}: {line[:40]!r} has no tag beside its token; write `token tag`")
        if max(abs(token), abs(tag)) > len(parts):
            raise UserError(f"{path}, line {number}: only {len(parts)} columns; columns asks for {token} and {tag}")
        tokens.append(parts[token - 1 if token > 0 else token])
        tags.append(parts[tag - 1 if tag > 0 else tag])
    if tokens:
        yield Record(Place(str(path), first, lines=True), (tokens, tags))


def _squad(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """SQuAD's JSON, 1.1 or 2.0: the first answer of each question, or none; the questions of an article are a group."""
    if columns not in (ANSWERS, ALL_ANSWERS):
        raise UserError(f"format: squad holds questions and answers; this task reads {', '.join(columns)}")
    text = "\n".join(line for _, line in _lines(path))
    if not text.strip():
        return
    found, number = _parsed(text, path, "it should be SQuAD's file"), 0
    try:
        for article in found["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    number += 1
                    answers = [] if question.get("is_impossible") else question["answers"]
                    answer = (answers[0]["text"], answers[0]["answer_start"]) if answers else ("", 0)
                    references = [[each["text"] for each in answers]] if columns == ALL_ANSWERS else []
                    place = Place(str(path), str(question.get("id", number)), "question")
                    values = (paragraph["context"], question["question"], *answer, *references)
                    yield Record(place, values, str(article.get("title", "")))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{path}, question {number}: not SQuAD's form ({error!r}); it holds data > paragraphs > qas > answers"
        ) from None


def _trec(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """`COARSE:fine question` a line; the label is the coarse one, or both for columns {label: fine}."""
    if columns != (*TEXT, "label"):
        raise UserError(f"format: trec holds questions and their kinds; this task reads {', '.join(columns)}")
    fine = corpus.columns.get("label") == "fine"
    for number, line in _lines(path):
        if not line.strip():
            continue
        kind, space, question = line.partition(" ")
        coarse, colon, _ = kind.partition(":")
        if not (space and coarse and colon):
            raise UserError(f"{path}, line {number}: {line[:40]!r} is no `COARSE:fine question`; check the line")
        yield Record(Place(str(path), number), (question, kind if fine else coarse))


READERS = {
    "text": _text,
    "tsv": _table,
    "csv": _table,
    "jsonl": _json_lines,
    "conll": _conll,
    "squad": _squad,
    "trec": _trec,
}


def _parsed(text: str, where: object, fix: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits, too
        raise UserError(f"{where}: not valid JSON ({error}); {fix}") from None
