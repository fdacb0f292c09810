"""`clearhead evaluate`: the scores of a model on its test set, or on files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from clearhead.errors import UserError


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run folder, or a name.")],
    data: Annotated[list[Path] | None, typer.Option(help="Test files; of parallel, source and target.")] = None,
    format: Annotated[str, typer.Option(help="Of the files: parallel, tsv, csv, jsonl, text …")] = "",
    beam: Annotated[int, typer.Option(min=1, max=64, help="Of translations.")] = 4,
    lowercase: Annotated[bool, typer.Option(help="Compare without regard to capitals.")] = False,
    moses: Annotated[str, typer.Option(help="Also BLEU on sacremoses tokens of this language, as older papers.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or int8.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one object.")] = False,
) -> None:
    """Score a model on its recipe's test set, or on files.

    Example: clearhead evaluate runs/multi30k-en-de --moses de --lowercase
    """
    from typing import get_args

    from clearhead.config.data import Corpus, Format
    from clearhead.config.settings import nearest
    from clearhead.evaluate.model import evaluate as score
    from clearhead.predict import load

    if format and format not in get_args(Format):
        raise UserError(f"--format: {format!r} is not allowed{nearest(format, list(get_args(Format)))}")
    corpora = []
    if data:
        kind = format or ("parallel" if len(data) == 2 else "text")
        corpora = [Corpus.build({"format": kind, "files": [str(path) for path in data]}, where="--data")]
    loaded = load(model, device, dtype)
    found = score(
        loaded, corpora, beam=beam, lowercase=lowercase, moses=moses, say=lambda line: typer.echo(line, err=True)
    )
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(len(name) for name in found)
    for name, value in found.items():
        typer.echo(f"{name:{width}}  {value:.4g}" if isinstance(value, float) else f"{name:{width}}  {value}")
