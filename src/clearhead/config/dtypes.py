"""Names of data types: one table for `load`, the command line and `train.precision`."""

from collections.abc import Iterable

from clearhead.errors import UserError

DTYPES = {  # short name: torch's name
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
    "int8": "int8",
    "int4": "int4",
}
FLOAT_DTYPES = ("fp32", "bf16", "fp16", "fp64")
ALIASES = {long: short for short, long in DTYPES.items()}


def parse_dtype(name: str, allowed: Iterable[str] = DTYPES, where: str = "dtype") -> str:
    """Return the short name of a data type; torch's names (float32, bfloat16, …) are aliases."""
    known = list(allowed)
    short = ALIASES.get(name, name) if isinstance(name, str) else name
    if short not in known:
        raise UserError(f"{where}: {name!r:.40} is not allowed; use {', '.join(known[:-1])} or {known[-1]}")
    return short
