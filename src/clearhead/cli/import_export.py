"""`clearhead import`, `export` and `pull`: models of other libraries in, ours out."""

from pathlib import Path
from typing import Annotated

import typer

from clearhead.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A folder (Hugging Face, CTranslate2) or a file (GGUF, .bin).")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The model folder to write; it must be new or empty.")],
    dtype: Annotated[str | None, typer.Option(help="Store as float32, bfloat16 or float16; else as it is.")] = None,
) -> None:
    """Turn a model of another library into a model folder.

    Example: clearhead import downloads/all-MiniLM-L6-v2 models/minilm
    """
    import torch

    from clearhead.checkpoint.formats import import_model

    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype: {dtype!r} is not allowed; use {', '.join(DTYPES)}")
    import_model(source, folder, None if dtype is None else getattr(torch, dtype))
    typer.echo(folder)


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run folder, or a name.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; it must be new or empty.")],
    to: Annotated[str, typer.Option(help="hf, gguf, gguf-q8_0, ctranslate2 or onnx.")],
) -> None:
    """Write a model for another library.

    Example: clearhead export runs/multi30k-en-de exported --to ctranslate2
    """
    from clearhead.checkpoint import load_model
    from clearhead.checkpoint.formats import export_model
    from clearhead.predict.find import find_model

    export_model(load_model(find_model(model)), folder, to)
    typer.echo(folder)


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="minilm, smollm2, or hf:organization/name.")],
) -> None:
    """Fetch a model and keep it for this user; every verb then knows it by its name.

    Example: clearhead pull smollm2
    """
    from clearhead.checkpoint.formats.pull import pull as fetch

    typer.echo(fetch(name, lambda line: typer.echo(line, err=True)))
