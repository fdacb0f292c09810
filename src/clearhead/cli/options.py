"""Options shared by the commands that load a model."""

from collections.abc import Iterable
from typing import Annotated

import typer

from clearhead.errors import UserError

DTYPES = {  # short name: torch's name
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
    "int8": "int8",
    "int4": "int4",
}
ALIASES = {long: short for short, long in DTYPES.items()}
FLOAT_DTYPES = ("fp32", "bf16", "fp16", "fp64")


def parse_dtype(name: str, allowed: Iterable[str] = DTYPES, where: str = "--dtype") -> str:
    """Return the short name of a data type; torch's names (float32, bfloat16, …) are aliases."""
    known = list(allowed)
    short = ALIASES.get(name, name)
    if short not in known:
        raise UserError(f"{where}: {name!r:.40} is not allowed; use {', '.join(known[:-1])} or {known[-1]}")
    return short


def _torch_name(name: str | None) -> str | None:
    return None if name is None else DTYPES[parse_dtype(name)]


ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, run folder, or model name.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str | None, typer.Option(callback=_torch_name, help="fp32, bf16, fp16, fp64, int8 or int4.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
