"""Input of the commands for many texts: plain lines, CSV, TSV and JSON lines as records with their texts."""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.errors import UserError

FORMATS = ("text", "csv", "tsv", "jsonl")
# Names of columns that hold the texts of a command, tried in this order without --column
COLUMN_NAMES = {
    "text": ("text", "source", "sentence", "prompt", "sentence1", "premise", "content", "review", "comment", "message"),
    "prompt": ("prompt", "text", "source", "sentence"),
    "second": ("second", "sentence2", "hypothesis"),
    "question": ("question", "query"),
    "context": ("context",),
}
SEPARATE = {
    "second": "separate the two texts by one tab, or use --text-pair",
    "context": "separate question and context by one tab, or use --context",
}
ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # a byte that is not UTF-8, as read by surrogateescape


class Record(NamedTuple):
    """One input: its line, its texts, the columns of its row, and the problem of one that cannot be read."""

    number: int
    texts: tuple[str, ...]
    row: list[str] | dict[str, Any] | None = None
    problem: str = ""


class RecordReader:
    """The records of a file, or of standard input for `-`; `header` is known once a record has been read."""

    def __init__(self, path: Path, format: str | None = None, column: str | None = None):
        self.path, self.column = path, column
        self.name = "standard input" if str(path) == "-" else str(path)
        self.format = _check_format(path, format)
        self.header: list[str] | None = None
        self.columns = tuple(part.strip() for part in column.split(",")) if column else ()
        if column and self.format == "text":
            raise UserError("--column: plain text has no columns; give --format csv, tsv or jsonl")
        self.roles: tuple[str, ...] = ()

    def set_roles(self, *roles: str) -> None:
        """Say what the texts of a record are."""
        self.roles = roles
        if self.columns and (len(self.columns) != len(roles) or not all(self.columns)):
            wanted = ",".join(name.upper() for name in roles)
            raise UserError(f"--column: {self.column!r:.60} is not the {' and the '.join(roles)}; write {wanted}")

    def __iter__(self) -> Iterator[Record]:
        """Read the records; one that cannot be read has a problem."""
        readers: dict[str, Callable[[], Iterator[Record]]] = {"text": self._lines, "jsonl": self._json_lines}
        for record in readers.get(self.format, self._table)():
            is_text = not any(map(ESCAPED_BYTE.search, record.texts))
            yield record if is_text else record._replace(problem="not valid UTF-8; save the file as UTF-8")

    def _read(self, max_bytes: int) -> Iterator[str]:
        from clearhead.files import read_lines

        return read_lines(self.path, max_bytes, errors="surrogateescape")

    def _lines(self) -> Iterator[Record]:
        from clearhead.limits import MAX_LINE_BYTES

        for number, line in enumerate(self._read(MAX_LINE_BYTES), start=1):
            yield self.split(number, line)

    def split(self, number: int, line: str) -> Record:
        """A plain line as a record: two texts are separated by a tab."""
        texts = (line,) if len(self.roles) == 1 else tuple(line.split("\t"))
        if len(texts) == len(self.roles):
            return Record(number, texts)
        return Record(number, (line,), problem=f"{len(texts) - 1} tabs; {SEPARATE[self.roles[-1]]}")

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """The rows of CSV, or of TSV, where quotes are literal; without blank lines."""
        from clearhead.limits import MAX_RECORD_BYTES

        lines = self._read(MAX_RECORD_BYTES)
        if self.format == "tsv":
            yield from ((number, line.split("\t")) for number, line in enumerate(lines, start=1) if line)
            return
        reader = csv.reader((line + "\n" for line in lines), strict=True)
        first = 1
        try:
            for row in reader:
                if row:
                    yield first, row
                first = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{self.name}, line {first}: {error}; check the quotation marks of this row") from None

    def _table(self) -> Iterator[Record]:
        rows = self._rows()
        indices = None
        if self.columns and all(column.isdecimal() and int(column) for column in self.columns):
            indices = [int(column) - 1 for column in self.columns]  # numbers: there is no header
        width = 0
        for number, row in rows:
            if not width and indices is not None and max(indices) >= len(row):
                wrong, columns = max(indices) + 1, len(row)
                raise UserError(f"{self.name}: no column {wrong}; the first line has {columns}, counted from 1")
            width = width or len(row)
            if indices is None:
                self.header = row
                indices = [row.index(name) for name in self._find_columns(row)]
                continue
            problem = ""
            if len(row) > width:
                problem = f"{len(row)} columns, but the first line has {width}; quote cells that contain a separator"
            elif len(row) <= max(indices):
                problem = f"only {len(row)} columns, but the text is in column {max(indices) + 1}"
            row = [*row, *[""] * (width - len(row))][:width]  # results are added behind
            yield Record(number, () if problem else tuple(row[index] for index in indices), row, problem)

    def _json_lines(self) -> Iterator[Record]:
        from clearhead.files import parse_json
        from clearhead.limits import MAX_RECORD_BYTES

        keys: list[str] | None = None
        for number, line in enumerate(self._read(MAX_RECORD_BYTES), start=1):
            if not line.strip():
                continue
            try:
                item = parse_json(line)
            except ValueError as error:
                yield Record(number, (), {}, f"{error}; write one object per line")
                continue
            if not isinstance(item, dict):
                yield Record(number, (), {}, f"{type(item).__name__}, not an object; write one object per line")
                continue
            keys = keys or self._find_columns(list(item))
            wrong = [key for key in keys if not isinstance(item.get(key), str)]
            problem = f"key {wrong[0]!r} is {type(item.get(wrong[0])).__name__}, not a string" if wrong else ""
            yield Record(number, () if wrong else tuple(item[key] for key in keys), item, problem)

    def _find_columns(self, names: list[str]) -> list[str]:
        """The columns of the texts: as given, else the usual names."""
        from clearhead.config.settings import nearest

        for name in self.columns:
            if name not in names:
                fix = "" if self.format == "jsonl" else "; without a header, give the number of the column"
                raise UserError(f"{self.name}: no column {name!r:.60}{nearest(name, names)}{fix}")
        if self.columns:
            return list(self.columns)
        found = []
        for role in self.roles:
            found += [name for name in COLUMN_NAMES[role] if name in names and name not in found][:1]
        if len(found) < len(self.roles):
            shown = ", ".join(name[:40] for name in names[:20])
            example = ",".join("NAME" if role == "text" else role.upper() for role in self.roles)
            fix = "" if self.format == "jsonl" else ", or by its number if there is no header"
            raise UserError(
                f"{self.name}: which column holds the {' and the '.join(self.roles)}? the first line has {shown}; "
                f"give it with --column {example}{fix}"
            )
        return found


def _check_format(path: Path, format: str | None) -> str:
    """The format given, else the one of the file's extension."""
    from clearhead.config.data import FORMAT_OF_SUFFIX, data_suffix

    if format is not None:
        check_choice("--format", format, FORMATS)
        return format
    found: str = FORMAT_OF_SUFFIX.get(data_suffix(path.name), "text")
    if found not in FORMATS:
        raise UserError(
            f"{path}: the name says {found}, which is not read here; save it as CSV, TSV or JSON lines, or give "
            "--format jsonl or --format text to read it line by line"
        )
    return found


def check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that is not allowed, with the nearest one that is."""
    from clearhead.config.settings import nearest

    if value not in allowed:
        raise UserError(f"{option}: {value!r:.40} is not allowed{nearest(value, list(allowed))}")
