"""Model folders of format version 1: their settings and tensor names in the words of version 2."""

from collections.abc import Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")

MODEL = {"width": "dim", "head_width": "head_dim", "ff_width": "ff_dim"}
DATA = {
    "published": "source_url",
    "normalise": "normalize",
    "shortest": "min_length",
    "longest": "max_length",
    "ratio": "max_length_ratio",
    "boundaries": "isolate_documents",
    "second": "text_pairs",
    "both_orders": "swap_pairs",
    "masked": "mask_prob",
    "whole_words": "whole_word_masking",
    "highest": "max_score",
    "tokens": "batch_tokens",
    "pool": "bucket_size",
    "cache": "cache_dir",
}
CORPUS = {"shortest": "min_length", "longest": "max_length"}
EXTRA = {"longest": "max_length"}
WEIGHTS = {
    "heads.lm_head.scores.": "heads.lm_head.proj.",
    "heads.lm_head.": "heads.lm_head.",
    "heads.classes.scores.": "heads.classes.proj.",
    "heads.tags.scores.": "heads.tags.proj.",
}


def migrate_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a version 1 config.json as version 2 has it."""
    found = _renamed(data, EXTRA) | {"version": 2}
    model = found.get("model")
    if isinstance(model, dict):
        model = _renamed(model, MODEL)
        if isinstance(model.get("outputs"), list):
            model["outputs"] = ["lm" if output == "words" else output for output in model["outputs"]]
        found["model"] = _pooling(model)
    if isinstance(found.get("data"), dict):
        found["data"] = _migrate_data(found["data"])
    return _pooling(found)


def migrate_weights(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Tensors by their version 2 names; the scales of int8 matrices come along."""
    return {migrate_name(name): tensor for name, tensor in tensors.items()}


def migrate_name(name: str) -> str:
    """The version 2 name of a tensor."""
    prefix = next((prefix for prefix in WEIGHTS if name.startswith(prefix)), None)
    return name if prefix is None else WEIGHTS[prefix] + name.removeprefix(prefix)


def _migrate_data(data: Mapping[str, Any]) -> dict[str, Any]:
    found = _pooling(_renamed(data, DATA))
    for part in ("train", "valid", "test"):
        corpora = found.get(part)
        if isinstance(corpora, list):
            found[part] = [_renamed(each, CORPUS) if isinstance(each, dict) else each for each in corpora]
    return found


def _pooling(data: dict[str, Any]) -> dict[str, Any]:
    return data | {"pooling": "cls"} if data.get("pooling") == "class" else data


def _renamed(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in data.items()}
