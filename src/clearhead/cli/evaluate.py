"""`clearhead evaluate`: compute the metrics of a model on its test set, or on files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.options import Device, Dtype, ModelName
from clearhead.cli.output import echo, echo_json
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.config.data import Corpus, DataConfig

MAX_TABLE_LABELS = 12  # of a confusion matrix that fits a terminal


def evaluate(
    model: ModelName,
    data: Annotated[
        list[Path] | None, typer.Option(help="Test file; repeat for parallel files (source, target).")
    ] = None,
    format: Annotated[str, typer.Option(help="File format: tsv, csv, conll, … Default: as in the recipe.")] = "",
    columns: Annotated[str, typer.Option(help="Columns of the files, like text=1,label=2.")] = "",
    labels: Annotated[str, typer.Option(help="Rename labels of the files, like 1=World,2=Sports.")] = "",
    unseen: Annotated[
        bool, typer.Option(help="Also score only the texts that do not occur in the training data.")
    ] = False,
    beam: Annotated[int, typer.Option(min=1, max=64, help="Beam size for translation.")] = 4,
    lowercase: Annotated[bool, typer.Option(help="Lowercase outputs and references before scoring.")] = False,
    tokenized_bleu: Annotated[
        str, typer.Option(metavar="LANG", help="Also compute BLEU after Moses tokenization for this language.")
    ] = "",
    alignment: Annotated[
        str, typer.Option(metavar="LANGS", help="Only score word alignments on the built-in grammar, like en-de.")
    ] = "",
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Evaluate a model on the test set of its recipe, or on files.

    Example: clearhead evaluate runs/multi30k-en-de/last --tokenized-bleu de --lowercase
    """
    from typing import get_args

    from clearhead.config.data import Format
    from clearhead.config.settings import nearest
    from clearhead.evaluate.model import evaluate as compute_metrics
    from clearhead.predict import load

    if format and format not in get_args(Format):
        raise UserError(f"--format: {format!r} is not allowed{nearest(format, list(get_args(Format)))}")
    for option, value in (("--columns", columns), ("--labels", labels)):
        if value and not data:
            raise UserError(f"{option}: needs --data; name the files")
    if alignment and data:
        raise UserError("--alignment: is measured on the built-in grammar; leave --data out")
    loaded = load(model, device, dtype)
    if alignment:
        from clearhead.evaluate.alignment import evaluate_alignment

        _print_metrics(evaluate_alignment(loaded, alignment), as_json)
        return
    corpora = [_corpus(loaded.data, data, format, columns, labels)] if data else []
    metrics = compute_metrics(
        loaded,
        corpora,
        beam=beam,
        lowercase=lowercase,
        tokenized_bleu=tokenized_bleu,
        unseen=unseen,
        log=lambda line: echo(line, err=True),
    )
    _print_metrics(metrics, as_json)


def _print_metrics(metrics: dict[str, Any], as_json: bool) -> None:
    """Print metrics as JSON, or one a line after the confusion matrix."""
    if as_json:
        echo_json(metrics, indent=2)
        return
    _print_confusion(metrics.pop("confusion", None))
    width = max(len(name) for name in metrics)
    for name, value in metrics.items():
        echo(f"{name:{width}}  {value:.4g}" if isinstance(value, float) else f"{name:{width}}  {value}")


def _corpus(config: "DataConfig | None", files: list[Path], format: str, columns: str, labels: str) -> "Corpus":
    """The files as a corpus, in the format of the recipe's corpora unless given."""
    from clearhead.evaluate.api import corpus_of

    pairs = _parse_pairs("--columns", columns, "text=1,label=2") if columns else []
    names = {name: int(value) if value.lstrip("-").isdigit() else value for name, value in pairs}
    renamed = dict(_parse_pairs("--labels", labels, "1=World,2=Sports")) if labels else {}
    return corpus_of(config, [str(path) for path in files], format, names, renamed, where="--data")


def _parse_pairs(option: str, text: str, example: str) -> list[tuple[str, str]]:
    """Parse name=value,name=value."""
    pairs = []
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not name.strip() or not equals or not value.strip():
            raise UserError(f"{option}: {part!r} is not name=value; write it like {example}")
        pairs.append((name.strip(), value.strip()))
    return pairs


def _print_confusion(confusion: dict[str, Any] | None) -> None:
    """Print the confusion matrix: true labels down, predicted labels across."""
    if confusion is None or len(confusion["labels"]) > MAX_TABLE_LABELS:
        return
    width = max(6, *(len(label) + 2 for label in confusion["labels"]))
    echo(f"{'true':>{width}}" + f"{'predicted':>{width * len(confusion['labels'])}}")
    echo("".join(f"{text:>{width}}" for text in ("", *confusion["labels"])))
    for label, row in zip(confusion["labels"], confusion["counts"], strict=True):
        echo(f"{label:>{width}}" + "".join(f"{count:>{width},}" for count in row))
