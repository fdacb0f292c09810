"""`clearhead import`, `export` and `pull`: exchange models with other libraries."""

from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.options import Force, ModelName, utf8_path
from clearhead.cli.output import echo, say
from clearhead.cli.presets import format_bytes
from clearhead.errors import UserError

IMPORT_DTYPES = ("fp32", "bf16", "fp16")


def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Folder (Hugging Face, CTranslate2) or file (GGUF, .bin).")
    ],
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", callback=utf8_path, help="Model folder to write; new or empty, unless --force."),
    ],
    dtype: Annotated[str | None, typer.Option(help="Convert to fp32, bf16 or fp16. Default: unchanged.")] = None,
    force: Force = False,
) -> None:
    """Import a model from another library as a model folder.

    Example: clearhead import downloads/all-MiniLM-L6-v2 models/minilm
    """
    from clearhead.config.dtypes import DTYPES, parse_dtype

    if dtype is not None:
        dtype = parse_dtype(dtype, IMPORT_DTYPES, "--dtype")

    import torch

    from clearhead.checkpoint.formats import check_new_folder, import_model

    check_new_folder(folder, force, by_command=True)
    import_model(source, folder, None if dtype is None else getattr(torch, DTYPES[dtype]), replace=force)
    echo(folder)


def export(
    model: ModelName,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", callback=utf8_path, help="Folder to write; new or empty, unless --force."),
    ],
    to: Annotated[str, typer.Option(help="hf, gguf, gguf-q8_0, ctranslate2 or onnx.")],
    force: Force = False,
) -> None:
    """Export a model to the format of another library.

    Example: clearhead export runs/multi30k-en-de exported --to ctranslate2
    """
    from clearhead.checkpoint import load_model
    from clearhead.checkpoint.formats import check_new_folder, export_model
    from clearhead.predict.find import find_model

    check_new_folder(folder, force, by_command=True)  # before the weights are read
    export_model(load_model(find_model(model)), folder, to, replace=force)
    echo(folder)


def pull(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="minilm, smollm2, or hf:organization/name[@revision]. Default: list."),
    ] = None,
) -> None:
    """Download a model to the cache, so that it can be used by name; without a name, list what is there.

    Example: clearhead pull smollm2
    Example: clearhead pull hf:Qwen/Qwen3-0.6B
    """
    from clearhead.checkpoint.formats.pull import pull as download

    if name is None:
        _list_pulled()
        return
    echo(download(name, lambda line: echo(line, err=True)))


def _list_pulled() -> None:
    """Print the pulled models: name, bytes on disk, and where it came from, with the commit."""
    from clearhead.checkpoint import model_folder_info
    from clearhead.checkpoint.formats.pull import models_folder, pulled_models

    found = pulled_models()
    if not found:
        say(f"no models in {models_folder()}; download one with `clearhead pull smollm2`")
        return
    width = max(map(len, found))
    for name, folder in found.items():
        try:
            about = model_folder_info(folder)
            source = str(about.extra.get("source") or about.card.summary.partition("\n")[0])
            size = format_bytes(about.weight_bytes)
        except UserError as error:
            source, size = str(error), ""
        echo(f"{name:{width}}  {size:>9}  {source}".rstrip())
