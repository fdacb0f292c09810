"""What an architecture of Hugging Face is to us: settings and tensor names, in both directions."""

from collections.abc import Callable, Set
from typing import Any, NamedTuple

from clearhead.checkpoint.formats.fields import Fields
from clearhead.checkpoint.formats.tables import Table
from clearhead.config import ModelConfig
from clearhead.errors import UserError

Renames = tuple[tuple[str, str], ...]  # pattern and replacement

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}  # ours to theirs
SPELLINGS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Adapter(NamedTuple):
    """One architecture. `renames` turns older spellings of tensor names into the table's; `derived` is not needed."""

    name: str
    kinds: tuple[str, ...]  # their model_type
    family: str
    table: Callable[[ModelConfig], Table]
    ours: Callable[[Fields, Set[str]], ModelConfig]  # their config.json and the names of their tensors
    theirs: Callable[[ModelConfig], dict[str, Any]]
    renames: Callable[[ModelConfig], Renames]
    derived: tuple[str, ...] = ()


def spelt(fields: Fields, key: str, default: str) -> str:
    """Our name of the activation that a config names."""
    found = fields.text(key, default)
    if found not in SPELLINGS:
        raise UserError(f"{fields.where}: {key}: activation {found!r:.40} cannot be represented here")
    return SPELLINGS[found]
