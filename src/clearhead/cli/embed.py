"""`clearhead embed` and `similar`: sentence vectors, and the nearest lines of a file."""

from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.batch import Batch, Column, Failed, File, Format, OnError, Out, Output, Texts
from clearhead.cli.options import Device, Dtype, Force, JsonLines, ModelName
from clearhead.cli.output import echo, json_text
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.cli.records import Record
    from clearhead.predict import Match

Truncate = Annotated[bool, typer.Option("--truncate", help="Truncate texts that are too long.")]


def embed(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    format: Format = None,
    column: Column = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write: .npy, or .jsonl, .csv or .tsv. Default: print JSON lines.")
    ] = None,
    on_error: OnError = None,
    pooling: Annotated[str | None, typer.Option(help="mean or cls. Default: as in training.")] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to unit length.")] = True,
    truncate: Truncate = False,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines; the default without --out.")] = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Embed texts as JSON lines, as a column of a table, or as a NumPy file of shape (texts, dim).

    Example: clearhead embed minilm --file sentences.txt --out vectors.npy
    """
    from clearhead.predict import load

    _check_ending(out)
    batch = Batch(texts, file, format, column, out, on_error, as_json, force, empty="give one text per line")
    if out is None and batch.reader.format == "text":
        batch.as_json = True
    loaded = load(model, device, dtype)

    def predict(chunk: list[str]) -> list[Any]:
        return list(loaded.embed(chunk, pooling=pooling, normalize=normalize, truncate=truncate))

    def rounded(vector: Any) -> list[float]:
        return [round(float(value), 7) for value in vector]

    output = Output(
        keys=("text",),
        columns=("vector",),
        line=lambda vector: json_text(rounded(vector)) + "\n",
        to_json=lambda vector: {"vector": rounded(vector)},
        rows=lambda vector: [(rounded(vector),)],
    )
    if out is None or out.suffix != ".npy":
        batch.run(loaded, predict, output)
        return
    vectors = _NumpyFile(loaded.config.dim)
    try:
        batch.run(loaded, predict, output, vectors)
    finally:
        if vectors.count:
            echo(f"{vectors.count:,} vectors of dim {vectors.dim} in {out}", err=True)


def _check_ending(out: Path | None) -> None:
    """Refuse a name whose ending is none of the formats; a pipe or device has none."""
    from clearhead.config.data import FORMAT_OF_SUFFIX, data_suffix

    if out is None or out.suffix == ".npy" or (out.exists() and not out.is_file()):
        return
    if FORMAT_OF_SUFFIX.get(data_suffix(out.name)) not in ("csv", "tsv", "jsonl"):
        raise UserError(f"--out: {out}: vectors are written as .npy, .jsonl, .csv or .tsv; choose one of them")


class _NumpyFile:
    """A NumPy file that grows by a vector at a time; what could not be embedded is a row of NaN."""

    stream: IO[Any] | None = None

    def __init__(self, dim: int):
        self.dim, self.count = dim, 0

    def write(self, record: "Record", result: Any) -> None:
        """Append a vector."""
        assert self.stream is not None
        if not self.count:
            self._write_header()
        self.stream.write(result.astype("<f4").tobytes())
        self.count += 1

    def mark(self, record: "Record", failed: Failed) -> None:
        """Append NaN."""
        import numpy as np

        self.write(record, np.full(self.dim, np.nan))

    def finish(self) -> None:
        """Write the header again, now with the number of vectors: NumPy leaves room for it."""
        assert self.stream is not None
        self.stream.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        from numpy.lib import format

        assert self.stream is not None
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.count, self.dim)}
        format.write_array_header_1_0(self.stream, header)


def similar(
    model: ModelName,
    corpus: Annotated[
        Path, typer.Argument(metavar="FILE", help="Texts to search: one per line, or a table (.csv, .tsv, .jsonl).")
    ],
    queries: Annotated[
        list[str] | None, typer.Argument(metavar="QUERY", help="Default: lines of --file or standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="One query per line, or a table.")] = None,
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of FILE with the texts. Default: text.")
    ] = None,
    out: Out = None,
    on_error: OnError = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Matches per query.")] = 5,
    truncate: Truncate = False,
    force: Force = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Find the lines of FILE most similar to each query by exact cosine search: `score TAB line TAB text`.

    Example: clearhead similar minilm sentences.txt "A man plays the guitar."
    """
    from clearhead.predict import load
    from clearhead.predict.embed import nearest

    batch = Batch(queries, file, None, None, out, on_error, as_json, force)
    policy = "stop" if on_error == "stop" else "skip"  # lines that cannot be used are not found
    searched = Batch(None, corpus, None, column, on_error=policy, empty="give a file with one text per line")
    loaded = load(model, device, dtype)
    texts, lines, vectors = [], [], []
    for record, vector in searched.results(lambda chunk: list(loaded.embed(chunk, truncate=truncate))):
        if isinstance(vector, Failed):
            searched.count_failure(record, vector)
            continue
        searched.total += 1
        texts.append(record.texts[0])
        lines.append(record.number)
        vectors.append(vector)
    if not texts:
        searched.finish()
    import numpy as np

    matrix = np.stack(vectors)

    def search(chunk: list[str]) -> list[list["Match"]]:
        return nearest(loaded.embed(chunk, truncate=truncate), matrix, texts, top)

    def rows(matches: list["Match"]) -> list[tuple[float, int, str]]:
        return [(match.score, lines[match.index], match.text) for match in matches]

    output = Output(
        keys=("query",),
        columns=("score", "line", "match"),
        line=lambda matches: "".join(f"{score:.4f}\t{line}\t{text}\n" for score, line, text in rows(matches)),
        to_json=lambda matches: {
            "matches": [{"line": line, "text": text, "score": score} for score, line, text in rows(matches)]
        },
        rows=rows,
        null=("matches",),
    )
    batch.run(loaded, search, output)
    searched.finish()
