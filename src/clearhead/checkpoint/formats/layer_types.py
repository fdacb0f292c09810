"""Attention patterns of layers: our cycle of patterns to Hugging Face's `layer_types`, and back."""

from collections.abc import Callable, Sequence
from typing import Any

from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.config import ModelConfig
from clearhead.errors import UserError

FROM_HF = {"full_attention": "full", "sliding_attention": "window"}
MAX_LAYERS = 1024  # of a ModelConfig
TO_HF = {ours: theirs for theirs, ours in FROM_HF.items()}


def read_layer_types(fields: Fields, layers: int, default: Callable[[int], str]) -> list[str]:
    """Return the patterns of all layers as their shortest cycle; `default` gives that of a layer without the key."""
    if layers > MAX_LAYERS:
        raise UserError(f"{fields.where}: num_hidden_layers: {layers:,} is too large; use at most {MAX_LAYERS:,}")
    types = fields.strings("layer_types") or [TO_HF[default(number)] for number in range(layers)]
    if unknown := set(types) - FROM_HF.keys():
        raise UserError(f"{fields.where}: layer_types: {min(unknown)!r:.40} is not supported")
    if len(types) != layers:
        raise UserError(f"{fields.where}: layer_types: {len(types)} types, but {layers} layers")
    return shortest_cycle([FROM_HF[each] for each in types])


def write_layer_types(config: ModelConfig, layers: int) -> list[str]:
    """Return `layer_types`; a pattern without a name there becomes full attention."""
    return [TO_HF.get(config.attention[number % len(config.attention)], TO_HF["full"]) for number in range(layers)]


def shortest_cycle(patterns: Sequence[str]) -> list[str]:
    """Return the shortest list that gives `patterns` when it is repeated."""
    for length in range(1, len(patterns)):
        if all(each == patterns[number % length] for number, each in enumerate(patterns)):
            return list(patterns[:length])
    return list(patterns)


def window_settings(patterns: Sequence[str], window: Any) -> dict[str, Any]:
    """Return our settings of the patterns; a window only where a layer has it."""
    return {"attention": list(patterns)} | ({"window": window} if "window" in patterns else {})
