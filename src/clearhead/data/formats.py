"""File formats: plain text, parallel text, TSV, CSV, JSON lines, CoNLL, SQuAD and TREC, gzipped or not, to records.

A record has one value per column of the task, and its location for error messages.
"""

import csv
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.config.data import Corpus
from clearhead.config.settings import nearest
from clearhead.data.corpus_files import corpus_files
from clearhead.errors import UserError
from clearhead.files import parse_json, read_document, read_lines
from clearhead.limits import (
    CONTEXT_ALLOWANCE,
    CONTEXT_GROWTH,
    MAX_JSON_BYTES,
    MAX_LINE_BYTES,
    MAX_RECORD_BYTES,
    MAX_TEXT_CHARS,
)


class Location(NamedTuple):
    """File and line of a record."""

    file: str
    number: int | str
    unit: str = "line"
    line_per_item: bool = False  # every item of the record has its own line, as in CoNLL

    def for_item(self, item: int) -> "Location":
        """Return the location of one item of the record."""
        return self._replace(number=self.number + item) if self.line_per_item and isinstance(self.number, int) else self

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


class Record(NamedTuple):
    """One value per column of the task, and the location."""

    location: Location
    values: tuple[Any, ...]
    group: str = ""  # key of the held-out split; empty: the first value


# Columns that the tasks read, in the order of a record's values
TRANSLATION, TEXT, PAIR = ("source", "target"), ("text",), ("text", "second")
TAGS, ANSWERS = ("tokens", "tags"), ("context", "question", "answer", "start")
ANSWERS_WITH_REFERENCES = (*ANSWERS, "references")  # for evaluation: all correct answers
TEXT_COLUMNS = ("source", "target", "text", "second", "tokens", "context", "question")  # cleaned and tokenized

DEFAULT_COLUMNS = {
    "source": 1,
    "target": 2,
    "text": 1,
    "second": 2,
    "tokens": 1,
    "tags": -1,
}  # label: the last column read


def read_corpus(corpus: Corpus, columns: tuple[str, ...], source_url: str = "") -> Iterator[Record]:
    """Yield the records of a corpus of files."""
    files = corpus_files(corpus, source_url)
    unknown = set(corpus.columns) - set(columns)
    if unknown:
        name = sorted(unknown)[0]
        raise UserError(f"columns: this task has no column {name!r}{nearest(name, list(columns))}")
    if corpus.format == "parallel":
        if len(columns) != 2:
            raise UserError(f"format: parallel files hold a source and a target; this task reads {', '.join(columns)}")
        groups: list[Iterable[Record]] = [_parallel(*pair) for pair in zip(files[::2], files[1::2], strict=True)]
    else:
        groups = [READERS[corpus.format](path, corpus, columns) for path in files]
    for path, group in zip(files[:: 2 if corpus.format == "parallel" else 1], groups, strict=True):
        empty = True
        for record in group:
            empty = False
            yield _rename_labels(record, columns, corpus.rename) if corpus.rename else record
        if empty:
            raise UserError(f"{path} is empty; give a file with content")


def _rename_labels(record: Record, columns: tuple[str, ...], names: dict[str, str]) -> Record:
    """Map the label or tags of a record by `corpus.rename`."""
    values = list(record.values)
    for index, column in enumerate(columns):
        if column == "label":
            values[index] = names.get(str(values[index]), values[index])
        elif column == "tags" and isinstance(values[index], list):
            values[index] = [names.get(str(tag), tag) for tag in values[index]]
    return record._replace(values=tuple(values))


def _lines(path: Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, str]]:
    """Number the lines of a file from 1."""
    return enumerate(read_lines(path, max_bytes), start=1)


def _parallel(source: Path, target: Path) -> Iterator[Record]:
    """Pair line n of the source with line n of the target."""
    lines = zip_longest(_lines(source), _lines(target))
    for number, (left, right) in enumerate(lines, start=1):
        if left is None or right is None:
            rest = number + sum(1 for _ in lines)
            counts = (number - 1, rest) if left is None else (rest, number - 1)
            raise UserError(
                f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}: line {number} of one has no "
                "counterpart; parallel files need the same number of lines"
            )
        yield Record(Location(str(source), number), (left[1], right[1]))


def _text(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    if columns != TEXT:
        raise UserError(f"format: plain text has no columns; this task reads {', '.join(columns)}; use tsv or jsonl")
    return (Record(Location(str(path), number), (line,)) for number, line in _lines(path))


def _table(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """Read TSV (no quoting: quotes are literal) or CSV (quoted)."""
    if columns in (TAGS, ANSWERS, ANSWERS_WITH_REFERENCES):
        raise UserError(
            f"format: {corpus.format} has no lists in its columns; this task reads {', '.join(columns[:4])}; use jsonl"
        )
    if corpus.format == "csv":
        lines = _CsvLines(path)
        reader = csv.reader(lines, strict=True)
        rows = ((reader.line_num, row) for row in lines.rows(reader))
    else:
        rows = ((number, line.split("\t")) for number, line in _lines(path, MAX_RECORD_BYTES))
    try:
        numbers_or_names = {name: corpus.columns.get(name, DEFAULT_COLUMNS.get(name, len(columns))) for name in columns}
        indices = None
        if corpus.header or any(isinstance(each, str) for each in numbers_or_names.values()):
            number, header = next(rows, (0, []))
            if not number:
                return
            indices = [_column_index(path, header, each) for each in numbers_or_names.values()]
        indices = indices or [
            each - 1 if isinstance(each, int) and each > 0 else int(each) for each in numbers_or_names.values()
        ]
        min_columns = max(index + 1 if index >= 0 else -index for index in indices)
        for number, row in rows:
            if len(row) < min_columns:
                if not any(row):  # a blank line
                    continue
                separator, other, sign = ("commas", "tsv", "\t") if corpus.format == "csv" else ("tabs", "csv", ",")
                hint = f"; if the file is {other}, set format" if any(sign in each for each in row) else ""
                raise UserError(
                    f"{path}, line {number}: only {len(row)} columns, but {min_columns} are needed for "
                    f"{' and '.join(columns)}; separate columns by {separator}, or set columns{hint}"
                )
            yield Record(Location(str(path), number), tuple(row[index] for index in indices))
    except csv.Error as error:
        raise UserError(f"{path}, line {lines.first}: {error}; check the quotation marks of this row") from None


class _CsvLines:
    """The lines of a CSV file, which limits a row that has many of them."""

    def __init__(self, path: Path):
        self.path, self.row_chars = path, 0
        self.first = 1  # line of the row that is read now

    def __iter__(self) -> Iterator[str]:
        for number, line in _lines(self.path, MAX_RECORD_BYTES):
            self.row_chars += len(line)
            if self.row_chars > MAX_RECORD_BYTES:
                raise UserError(
                    f"{self.path}, line {number}: a row of more than {MAX_RECORD_BYTES:,} characters; "
                    "check the quotation marks"
                )
            yield line + "\n"

    def rows(self, reader: Any) -> Iterator[list[str]]:
        """Yield the rows of a csv.reader, starting to count again after each."""
        for row in reader:
            self.row_chars, self.first = 0, reader.line_num + 1
            yield row


def _column_index(path: Path, header: list[str], name: int | str) -> int:
    if isinstance(name, int):
        return name - 1 if name > 0 else len(header) + name
    if name not in header:
        raise UserError(
            f"{path}, line 1: no column {name!r}{nearest(name, header)}; without a header, give columns by number"
        )
    return header.index(name)


def _json_lines(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    names = [str(corpus.columns.get(name, name)) for name in columns if name != "references"]
    for number, line in _lines(path, MAX_RECORD_BYTES):
        if not line.strip():
            continue
        location = Location(str(path), number)
        item = _parse_json(line, location, "write one object per line")
        if not isinstance(item, dict):
            raise UserError(f"{location}: {type(item).__name__}, not an object; write one object per line")
        for name in names:
            if name not in item:
                raise UserError(f"{location}: no key {name!r}{nearest(name, list(item))}")
        values = [item[name] for name in names]
        yield Record(location, (*values, [values[2]]) if columns == ANSWERS_WITH_REFERENCES else tuple(values))


def _conll(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """Read one token and tag per line, with a blank line between sentences."""
    if columns != TAGS:
        raise UserError(f"format: conll holds tokens and tags; this task reads {', '.join(columns)}")
    token, tag = (corpus.columns.get(name, DEFAULT_COLUMNS[name]) for name in TAGS)
    if isinstance(token, str) or isinstance(tag, str):
        raise UserError("columns: conll has no header; give the columns of tokens and tags by number, like 1 and -1")
    tokens: list[str] = []
    tags: list[str] = []
    first, chars = 1, 0
    for number, line in _lines(path):
        parts = line.rstrip("\t ").split("\t") if "\t" in line else line.split()
        if not line.strip() or parts[0] == "-DOCSTART-":
            if tokens:
                yield Record(Location(str(path), first, line_per_item=True), (tokens, tags))
            tokens, tags, first, chars = [], [], number + 1, 0
            continue
        chars += len(line) + 1
        if chars > MAX_TEXT_CHARS:
            raise UserError(
                f"{path}, line {number}: a sentence of more than {MAX_TEXT_CHARS:,} characters; "
                "put a blank line between sentences"
            )
        if len(parts) < 2 or not all(part.strip(" ") for part in parts):  # some corpora have other whitespace as tokens
            raise UserError(f"{path}, line {number}: {line[:40]!r} has no tag after its token; write `token tag`")
        if max(abs(token), abs(tag)) > len(parts):
            raise UserError(
                f"{path}, line {number}: only {len(parts)} columns, but columns names {token} and {tag}; change it"
            )
        tokens.append(parts[token - 1 if token > 0 else token])
        tags.append(parts[tag - 1 if tag > 0 else tag])
    if tokens:
        yield Record(Location(str(path), first, line_per_item=True), (tokens, tags))


def _squad(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """Read SQuAD 1.1 or 2.0: the first answer of each question, or none; held out by article."""
    if columns not in (ANSWERS, ANSWERS_WITH_REFERENCES):
        reads = ", ".join(columns)
        raise UserError(
            f"format: squad holds questions and answers; this task reads {reads}; for one object per line, use jsonl"
        )
    text = read_document(path, MAX_JSON_BYTES)
    if not text.strip():
        return
    document, number, chars = _parse_json(text, path, "give a SQuAD file"), 0, 0
    max_chars, text = CONTEXT_ALLOWANCE + CONTEXT_GROWTH * len(text), ""
    try:
        for article in document["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    number += 1
                    answers = [] if question.get("is_impossible") else question["answers"]
                    answer = (answers[0]["text"], answers[0]["answer_start"]) if answers else ("", 0)
                    references = [[each["text"] for each in answers]] if columns == ANSWERS_WITH_REFERENCES else []
                    location = Location(str(path), str(question.get("id", number)), "question")
                    values = (paragraph["context"], question["question"], *answer, *references)
                    chars += len(values[0])
                    if chars > max_chars:
                        raise UserError(
                            f"{location}: contexts repeated for each question have {CONTEXT_GROWTH} times the size "
                            "of the file; ask fewer questions about a long context, or shorten it"
                        )
                    yield Record(location, values, str(article.get("title", "")))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{path}, question {number}: not in SQuAD format ({error!r}); expected data > paragraphs > qas > answers; "
            "for one object per line, use jsonl"
        ) from None


def _trec(path: Path, corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """Read lines of `COARSE:fine question`; the label is COARSE, or COARSE:fine with columns {label: fine}."""
    if columns != (*TEXT, "label"):
        raise UserError(f"format: trec holds questions and their classes; this task reads {', '.join(columns)}")
    fine = corpus.columns.get("label") == "fine"
    for number, line in _lines(path):
        if not line.strip():
            continue
        label, space, question = line.partition(" ")
        coarse, colon, _ = label.partition(":")
        if not (space and coarse and colon):
            raise UserError(f"{path}, line {number}: {line[:40]!r} is not `COARSE:fine question`; check the line")
        yield Record(Location(str(path), number), (question, label if fine else coarse))


READERS = {
    "text": _text,
    "tsv": _table,
    "csv": _table,
    "jsonl": _json_lines,
    "conll": _conll,
    "squad": _squad,
    "trec": _trec,
}


def _parse_json(text: str, where: object, fix: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{where}: {error}; {fix}") from None
