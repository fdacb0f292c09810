"""Options shared by the commands that load a model."""

from pathlib import Path
from typing import Annotated

import typer

from clearhead.errors import UserError
from clearhead.files import check_utf8_name


def _dtype_option(name: str | None) -> str | None:
    from clearhead.config.dtypes import parse_dtype

    return None if name is None else parse_dtype(name, where="--dtype")


def utf8_path(path: Path | None) -> Path | None:
    """Check the name of a folder to write before any work is done."""
    if path is not None:
        check_utf8_name(path)
    return path


def check_new(path: Path, force: bool, option: str = "--out") -> None:
    """Refuse to replace a file, or a folder that is not empty; checked before any work is done."""
    try:
        is_new = not any(path.iterdir()) if path.is_dir() else not path.is_file()  # a pipe or device can be written
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be used ({error.strerror}); choose another place") from None
    if not (is_new or force):
        raise UserError(f"{option}: {path} already exists; choose another name, or replace it with --force")


Force = Annotated[bool, typer.Option("--force", help="Replace what exists.")]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, run folder, or model name.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str | None, typer.Option(callback=_dtype_option, help="fp32, bf16, fp16, fp64, int8 or int4.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
