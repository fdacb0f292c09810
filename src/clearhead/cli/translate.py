"""`clearhead translate`: translate texts, files and pipes."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.batch import Batch, Column, File, Format, OnError, Out, Output, Texts
from clearhead.cli.options import Device, Dtype, Force, JsonLines, ModelName
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.predict import Translation


def translate(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    format: Format = None,
    column: Column = None,
    out: Out = None,
    on_error: OnError = None,
    beam: Annotated[int, typer.Option(min=1, max=64, help="Beam size; 1 is greedy search.")] = 4,
    n_best: Annotated[int, typer.Option(min=1, max=64, help="Translations per text.")] = 1,
    length_penalty: Annotated[
        float, typer.Option(min=-10, max=10, help="Length penalty exponent; higher values favor longer translations.")
    ] = 1.0,
    align: Annotated[bool, typer.Option(help="Print word alignments: i-j, then the words.")] = False,
    prefix: Annotated[str | None, typer.Option(help="Force every translation to start with this text.")] = None,
    src_lang: Annotated[
        str | None, typer.Option("--from", help="Language of the texts, for a model of several, like eng_Latn.")
    ] = None,
    tgt_lang: Annotated[str | None, typer.Option("--to", help="Language to translate to, like deu_Latn.")] = None,
    logprobs: Annotated[
        bool, typer.Option(help="Print the length-normalized log-probability of each translation.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="Concurrent batches; 0: two on a CPU.")] = 0,
    force: Force = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Translate texts, the lines of a file or of standard input, or a column of a table.

    Example: echo "Two dogs are playing in the snow." | clearhead translate en-de
    Example: clearhead translate hf:facebook/nllb-200-distilled-600M --from eng_Latn --to zho_Hans "Good morning."
    Example: clearhead translate en-de --file products.csv --column title --out products.de.csv
    """
    from clearhead.predict import load
    from clearhead.predict.languages import Languages, language_ids

    if n_best > beam:
        raise UserError(f"--n-best: {n_best} is more than --beam {beam}; raise --beam")
    batch = Batch(texts, file, format, column, out, on_error, as_json, force)
    loaded = load(model, device, dtype)
    if loaded.config.family == "encoder-decoder":
        language_ids(loaded, Languages(src_lang, tgt_lang), ("--from", "--to"))  # errors name these

    def process(chunk: list[str]) -> list["Translation"]:
        return loaded.translate(
            chunk,
            None if prefix is None else [prefix] * len(chunk),
            src_lang=src_lang,
            tgt_lang=tgt_lang,
            beam=beam,
            n_best=n_best,
            length_penalty=length_penalty,
            align=align,
            logprobs=logprobs,
            workers=workers,
        )

    def rows(best: "Translation") -> list[list[Any]]:
        return [_columns(result, logprobs, align) for result in best.candidates]

    output = Output(
        keys=("source",),
        columns=("translation", *["score"] * logprobs, *["alignment", "words"] * align),
        line=lambda best: "".join("\t".join(map(_one_line, row)) + "\n" for row in rows(best)),
        to_json=lambda best: {
            "translations": [{"text": r.text, "score": r.score, "alignment": _links(r)} for r in best.candidates]
        },
        rows=rows,
        null=("translations",),
    )
    batch.run(loaded, process, output)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _columns(result: "Translation", logprobs: bool, align: bool) -> list[str]:
    """The columns of an output line: text, score, links by number, links by word."""
    columns = [result.text]
    if logprobs:
        columns.append("" if result.score is None else f"{result.score:.4f}")
    if align:
        alignment = result.alignment
        columns.append("" if alignment is None else str(alignment))
        columns.append("" if alignment is None else " ".join(f"{i}→{j}" for i, j in alignment.pairs))
    return columns


def _links(result: "Translation") -> dict[str, Any] | None:
    """The words and links of an alignment for JSON."""
    alignment = result.alignment
    if alignment is None:
        return None
    return {"source": alignment.source, "target": alignment.target, "links": alignment.links}
