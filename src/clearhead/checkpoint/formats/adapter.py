"""Adapter between an architecture of Hugging Face and ours: settings and tensor names, in both directions."""

import re
from collections.abc import Callable, Set
from typing import Any, NamedTuple

from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.name_table import NameTable
from clearhead.config import ModelConfig
from clearhead.errors import UserError

Renames = tuple[tuple[str, str], ...]  # (pattern, replacement)

TO_HF_ACTIVATION = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
FROM_HF_ACTIVATION = {theirs: ours for ours, theirs in TO_HF_ACTIVATION.items()} | {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Adapter(NamedTuple):
    """One architecture of Hugging Face."""

    name: str
    model_types: tuple[str, ...]
    family: str
    table: Callable[[ModelConfig], NameTable]
    from_hf: Callable[[Fields, Set[str]], ModelConfig]  # from their config.json and tensor names
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    renames: Callable[[ModelConfig], Renames]  # from older spellings of tensor names to those of the table
    computed: tuple[str, ...] = ()  # patterns of tensors that we compute, so they are not read

    def has_class(self, name: str) -> bool:
        """Whether a class of Hugging Face is of this architecture: Phi3ForCausalLM is of Phi-3."""
        return re.match(self.name.replace("-", "") + r"(For|Model|LM)", name, re.IGNORECASE) is not None


def read_activation(fields: Fields, key: str, default: str) -> str:
    """Return our name of the activation in a config."""
    name = fields.string(key, default)
    if name not in FROM_HF_ACTIVATION:
        raise UserError(f"{fields.where}: {key}: activation {name!r:.40} is not supported")
    return FROM_HF_ACTIVATION[name]
