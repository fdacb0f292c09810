"""`clearhead evaluate`: the scores of a model on its test set, or on files."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.config.data import Corpus, DataConfig


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run folder, or a name.")],
    data: Annotated[list[Path] | None, typer.Option(help="Test files; of parallel, source and target.")] = None,
    format: Annotated[str, typer.Option(help="Of the files: tsv, csv, conll …; without it, as in the recipe.")] = "",
    columns: Annotated[str, typer.Option(help="What is where, like text=1,label=2; else as in the recipe.")] = "",
    labels: Annotated[str, typer.Option(help="What labels are called in the files, like 1=World,2=Sports.")] = "",
    unseen: Annotated[bool, typer.Option(help="Also score the texts that are in no training text.")] = False,
    beam: Annotated[int, typer.Option(min=1, max=64, help="Of translations.")] = 4,
    lowercase: Annotated[bool, typer.Option(help="Compare without regard to capitals.")] = False,
    moses: Annotated[str, typer.Option(help="Also BLEU on sacremoses tokens of this language, as older papers.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, int8 or int4.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one object.")] = False,
) -> None:
    """Score a model on its recipe's test set, or on files.

    Example: clearhead evaluate runs/multi30k-en-de/last --moses de --lowercase
    """
    from typing import get_args

    from clearhead.config.data import Format
    from clearhead.config.settings import nearest
    from clearhead.evaluate.model import evaluate as score
    from clearhead.predict import load

    if format and format not in get_args(Format):
        raise UserError(f"--format: {format!r} is not allowed{nearest(format, list(get_args(Format)))}")
    for name, given in (("--columns", columns), ("--labels", labels)):
        if given and not data:
            raise UserError(f"{name}: is about the files of --data; name them")
    loaded = load(model, device, dtype)
    corpora = [_corpus(loaded.data, data, format, columns, labels)] if data else []
    found = score(
        loaded,
        corpora,
        beam=beam,
        lowercase=lowercase,
        moses=moses,
        unseen=unseen,
        say=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        known = {name: None if value != value else value for name, value in found.items()}  # JSON has no NaN
        typer.echo(json.dumps(known, indent=2))
        return
    _table(found.pop("confusion", None))
    width = max(len(name) for name in found)
    for name, value in found.items():
        typer.echo(f"{name:{width}}  {value:.4g}" if isinstance(value, float) else f"{name:{width}}  {value}")


def _corpus(known: "DataConfig | None", files: list[Path], format: str, columns: str, labels: str) -> "Corpus":
    """The files as a corpus of the form that the recipe's own have, unless it is said otherwise."""
    from clearhead.config.data import Corpus

    like = next(iter((*known.test, *known.valid, *known.train)), None) if known is not None else None
    settings: dict[str, Any] = {"format": "parallel" if len(files) == 2 else "text"}
    if like is not None and like.files and format in ("", like.format):
        settings = {"format": like.format, "columns": dict(like.columns), "header": like.header}
    settings |= {"format": format} if format else {}
    if columns:
        pairs = _pairs("--columns", columns, "text=1,label=2")
        settings["columns"] = {name: int(place) if place.lstrip("-").isdigit() else place for name, place in pairs}
    if labels:
        settings["rename"] = dict(_pairs("--labels", labels, "1=World,2=Sports"))
    return Corpus.build(settings | {"files": [str(path) for path in files]}, where="--data")


def _pairs(option: str, given: str, example: str) -> list[tuple[str, str]]:
    """What stands on both sides of each equals sign."""
    found = []
    for each in given.split(","):
        name, equals, value = each.partition("=")
        if not name.strip() or not equals or not value.strip():
            raise UserError(f"{option}: {each!r} is no pair; write it like {example}")
        found.append((name.strip(), value.strip()))
    return found


def _table(found: dict[str, Any] | None) -> None:
    """How often each true label (down) was called each (across), where a terminal has room for it."""
    if found is None or len(found["labels"]) > 12:
        return
    width = max(6, *(len(label) + 2 for label in found["labels"]))
    typer.echo("".join(f"{text:>{width}}" for text in ("", *found["labels"])))
    for label, row in zip(found["labels"], found["counts"], strict=True):
        typer.echo(f"{label:>{width}}" + "".join(f"{count:>{width},}" for count in row))
