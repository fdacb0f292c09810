"""Many texts through a command: records in, results out in the same order; a bad line does not end the work."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import typer

from clearhead.cli.options import check_new
from clearhead.cli.output import echo, echo_json, json_text
from clearhead.cli.records import FORMATS, Record, RecordReader, check_choice
from clearhead.cli.text_input import poll, read_chunks
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.predict import Model

ON_ERROR = ("mark", "skip", "stop")
SHOWN_LINES = 5  # line numbers in the final message

Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Default: lines of --file or standard input.")]
File = Annotated[
    Path | None, typer.Option(help="Lines of text, or a table (.csv, .tsv, .jsonl), plain or gzip; - is stdin.")
]
Format = Annotated[
    str | None, typer.Option(help="Input format: text, csv, tsv or jsonl. Default: by the extension, else text.")
]
Column = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Column of the text (two: A,B); a number if there is no header. Default: text."),
]
Out = Annotated[
    Path | None, typer.Option(help="File to write: .csv, .tsv or .jsonl; otherwise lines. Default: stdout.")
]
OnError = Annotated[
    str | None,
    typer.Option(
        metavar="mark|skip|stop",
        help="A line that cannot be used is an empty line, is left out, or ends the work. Default: mark.",
    ),
]


class Failed(NamedTuple):
    """In place of a result: why there is none."""

    problem: str


class Output(NamedTuple):
    """How a command writes its results."""

    keys: tuple[str, ...]  # JSON keys of the texts
    columns: tuple[str, ...]  # result columns of a table
    line: Callable[[Any], str]  # plain text, with its line ends
    to_json: Callable[[Any], dict[str, Any]]
    rows: Callable[[Any], Iterable[Sequence[Any]]]  # values of the columns, once per candidate
    null: tuple[str, ...] = ()  # JSON keys that are null in a marked line; default: the columns
    show: Callable[[Any], None] | None = None  # prints a result to a terminal in place of `line`


@dataclass
class Batch:
    """The options for many texts, checked before any work."""

    texts: list[str] | None = None
    file: Path | None = None
    format: str | None = None
    column: str | None = None
    out: Path | None = None
    on_error: str | None = None
    as_json: bool = False
    force: bool = False
    roles: tuple[str, ...] = ("text",)  # empty: set later, when the model is known
    empty: str = ""  # how to mend an input without records; empty: that is no error
    total: int = field(default=0, init=False)
    failures: list[Record] = field(default_factory=list, init=False)  # the first of them
    failed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.texts and self.file is not None:
            raise UserError("--file: given together with texts; remove one of them")
        for option, value in (("--format", self.format), ("--column", self.column)):
            if self.texts and value:
                raise UserError(f"{option}: given together with texts; it describes a file or standard input")
        self.on_error = self.on_error or ("stop" if self.texts else "mark")
        check_choice("--on-error", self.on_error, ON_ERROR)
        self.reader = RecordReader(self.file or Path("-"), self.format, self.column)
        if self.roles:
            self.reader.set_roles(*self.roles)
        self.unit = "text" if self.texts else "line"
        self.where = "text" if self.texts else f"{self.reader.name}, line"
        if self.out is not None and self.as_json:
            raise UserError("--json: given together with --out; name the file .jsonl, or remove one of them")
        if self.out is not None:
            check_new(self.out, self.force)
            format_of_output(self.out)
            if not self.out.absolute().parent.is_dir():
                raise UserError(f"--out: cannot write {self.out} (no such folder); choose another file")

    def chunks(self) -> Iterator[list[Record]]:
        """The input in chunks: what has arrived, at most 512 records."""
        if self.texts:
            yield [self.reader.split(number, text) for number, text in enumerate(self.texts, start=1)]
            return
        found = False
        for chunk in read_chunks(self.reader, self.reader.path):
            found = True
            yield chunk
        if self.empty and not found:
            raise UserError(f"{self.reader.name}: empty; {self.empty}")

    def poll(self) -> Iterator[Record | None]:
        """The input record by record, and None while the next has not arrived."""
        return poll(self.reader, self.reader.path)

    def results(self, process: Callable[..., Sequence[Any]]) -> Iterator[tuple[Record, Any]]:
        """Each record with its result, or with Failed; `process` takes one list for each role."""
        for chunk in self.chunks():
            good = [record for record in chunk if not record.problem]
            outcomes = _outcomes([record.texts for record in good], process)
            for record in chunk:
                yield record, Failed(record.problem) if record.problem else next(outcomes)

    def run(
        self, model: "Model", process: Callable[..., Sequence[Any]], output: Output, sink: "Sink | None" = None
    ) -> None:
        """Write the result of every record, then report the ones that failed."""
        with self.writer(model, output, sink) as write:
            for record, result in self.results(process):
                write(record, result)

    @contextmanager
    def writer(
        self, model: "Model", output: Output, sink: "Sink | None" = None
    ) -> Iterator[Callable[[Record, Any], None]]:
        """A function that writes a result, or marks or skips one that failed; at the end, an error counts them."""
        from clearhead.cli.unfamiliar import UnfamiliarTexts

        unfamiliar = UnfamiliarTexts(model.tokenizer)
        with _open(self.out, binary=sink is not None) as stream:
            table = sink or Table(self, output)
            table.stream = stream

            def write(record: Record, result: Any) -> None:
                if isinstance(result, Failed):
                    if self.count_failure(record, result) == "mark":
                        table.mark(record, result)
                    return
                self.total += 1
                unfamiliar.add(record.texts)
                table.write(record, result)

            yield write
            table.finish()
        for line in unfamiliar.warnings(self.unit):
            echo(f"warning: {'' if self.texts else self.reader.name + ': '}{line}", err=True)
        self.finish()

    def count_failure(self, record: Record, failed: Failed) -> str:
        """Count a record that failed and return what to do with it; `stop` is an error."""
        if self.on_error == "stop":
            raise self.error(record.number, failed.problem)
        self.total, self.failed = self.total + 1, self.failed + 1
        if len(self.failures) < SHOWN_LINES:
            self.failures.append(record._replace(problem=failed.problem))
        return str(self.on_error)

    def error(self, number: int, problem: str) -> UserError:
        """The error that names the line."""
        return UserError(f"{self.where} {number}: {problem}")

    def finish(self) -> None:
        """Raise if records have failed."""
        if not self.failed:
            return
        name = "" if self.texts else f"{self.reader.name}: "
        units = f"{self.unit}s" if self.total > 1 else self.unit
        fate = "left empty in the output" if self.on_error == "mark" else "left out"
        first, *others = self.failures
        numbers = ", ".join(f"{record.number:,}" for record in others) + ", …" * (self.failed > SHOWN_LINES)
        also = f"; also {self.unit}{'s' if len(others) > 1 else ''} {numbers}" if others else ""
        raise UserError(
            f"{name}{self.failed:,} of {self.total:,} {units} failed, {fate}; "
            f"{self.unit} {first.number:,}: {first.problem}{also}"
        )


def _outcomes(texts: list[tuple[str, ...]], process: Callable[..., Sequence[Any]]) -> Iterator[Any]:
    """Results in order, with Failed for texts that are invalid: a chunk that has one is halved to find it."""
    from clearhead.predict.encode_batch import InvalidText

    if not texts:
        return
    try:
        yield from process(*map(list, zip(*texts, strict=True)))
    except InvalidText as error:
        if len(texts) == 1:
            yield Failed(error.problem.replace("truncate=True", "--truncate"))
            return
        for half in (texts[: len(texts) // 2], texts[len(texts) // 2 :]):
            yield from _outcomes(half, process)


class Sink(Protocol):
    """Where results go."""

    stream: IO[Any] | None  # the open file of --out; None: stdout

    def write(self, record: Record, result: Any) -> None:
        """Write the result of a record."""

    def mark(self, record: Record, failed: Failed) -> None:
        """Write what stands for a record that failed."""

    def finish(self) -> None:
        """Complete the output."""


class Table:
    """Results as lines, JSON lines, CSV or TSV; a table keeps the columns of its input."""

    stream: IO[Any] | None = None

    def __init__(self, batch: Batch, output: Output):
        self.batch, self.output = batch, output
        self.source = batch.reader.format  # of the input
        self.format = "jsonl" if batch.as_json else self.source if batch.out is None else format_of_output(batch.out)
        self.started, self.header = False, list[str]()

    def write(self, record: Record, result: Any) -> None:
        """Write the result of a record."""
        if self.format == "text":
            if self.output.show is not None and self.stream is None:
                self.output.show(result)
            else:
                self._put(self.output.line(result))
        elif self.format == "jsonl" and self.source == "text":
            self._put_json(self._texts(record) | self.output.to_json(result))
        else:
            for values in self.output.rows(result):
                self._put_row(record, dict(zip(self.output.columns, values, strict=True)))

    def mark(self, record: Record, failed: Failed) -> None:
        """Write an empty line, empty cells, or nulls with the error."""
        if self.format == "text":
            self._put("\n")
            return
        names = self.output.columns if self.source != "text" else self.output.null or self.output.columns
        row: dict[str, Any] = dict.fromkeys(names)
        if self.format == "jsonl":
            row["error"] = failed.problem
        if self.format == "jsonl" and self.source == "text":
            self._put_json(self._texts(record) | row)
        else:
            self._put_row(record, row)

    def finish(self) -> None:
        """Write the header of a table without records."""
        if self.format in ("csv", "tsv") and not self.started and self.batch.reader.header is not None:
            self._put_header(self.batch.reader.header)

    def _texts(self, record: Record) -> dict[str, Any]:
        return dict(zip(self.output.keys, record.texts, strict=False))

    def _put_row(self, record: Record, results: Mapping[str, Any]) -> None:
        """Write a row: the columns of the input, then the results."""
        reader = self.batch.reader
        names = list(self.output.keys[: len(reader.roles)])  # of plain lines
        values: Sequence[Any] = [*record.texts, *[""] * (len(names) - len(record.texts))]
        if isinstance(record.row, dict):
            if self.format != "jsonl" and not self.started and not record.row:  # the columns are not known yet
                return
            names = self.header if self.started and self.format != "jsonl" else list(record.row)
            values = [record.row.get(name) for name in names]
        elif record.row is not None:
            names = reader.header or [f"column{number}" for number in range(1, len(record.row) + 1)]
            values = record.row
        if self.format == "jsonl":
            named = {f"predicted_{name}" if name in names else name: value for name, value in results.items()}
            self._put_json(dict(zip(names, values, strict=True)) | named)
            return
        if not self.started and (reader.header is not None or not isinstance(record.row, list)):
            self._put_header(names)
        self.started = True
        self._put_cells([*values, *results.values()])

    def _put_header(self, names: list[str]) -> None:
        self.started, self.header = True, names
        self._put_cells([*names, *(f"predicted_{name}" if name in names else name for name in self.output.columns)])

    def _put_cells(self, values: Iterable[Any]) -> None:
        cells = [_cell(value) for value in values]
        if self.format == "tsv":
            self._put("\t".join(" ".join(cell.replace("\t", " ").splitlines()) for cell in cells) + "\n")
            return
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        self._put(line.getvalue())

    def _put_json(self, value: dict[str, Any]) -> None:
        if self.stream is None:
            echo_json(value)
        else:
            self._put(json_text(value) + "\n")

    def _put(self, text: str) -> None:
        if self.stream is None:
            echo(text, end="")
        else:
            self.stream.write(text)


def _cell(value: Any) -> str:
    """A value in a table: lists and objects are JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def format_of_output(path: Path) -> str:
    """The format of a file to write, by its extension."""
    from clearhead.config.data import FORMAT_OF_SUFFIX, data_suffix

    found: str = FORMAT_OF_SUFFIX.get(data_suffix(path.name), "text")
    if found not in FORMATS:
        raise UserError(f"--out: {path}: results are written as .csv, .tsv, .jsonl or plain lines; choose one of them")
    return found


@contextmanager
def _open(path: Path | None, binary: bool) -> Iterator[IO[Any] | None]:
    """Open the file to write, packed if its name ends in .gz; one without content is removed if the work fails."""
    if path is None:
        yield None
        return
    try:
        opener: Callable[..., IO[Any]] = gzip.open if path.suffix == ".gz" else open
        text = {} if binary else {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
        stream = opener(path, "wb" if binary else "wt", **text)
    except OSError as error:
        raise UserError(f"--out: cannot write {path} ({error.strerror}); choose another file") from None
    try:
        with stream:
            yield stream
    except BaseException:
        if path.is_file() and not path.stat().st_size:
            path.unlink()
        raise
