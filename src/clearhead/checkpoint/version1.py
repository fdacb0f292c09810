"""Migration of model folders of format version 1: settings and tensor names in version 2's words."""

from collections.abc import Mapping
from typing import Any

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
EXTRA = {"longest": "max_length", "ends": "eos_ids", "banned": "banned_ids"}
TENSOR_PREFIXES = {
    "heads.words.scores.": "heads.lm_head.proj.",
    "heads.words.": "heads.lm_head.",
    "heads.classes.scores.": "heads.classes.proj.",
    "heads.tags.scores.": "heads.tags.proj.",
}


def migrate_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the version 2 form of a version 1 config.json."""
    migrated = _rename_pooling(_rename_keys(data, EXTRA)) | {"version": 2}
    if isinstance(model := migrated.get("model"), dict):
        model = _rename_pooling(_rename_keys(model, MODEL))
        if isinstance(model.get("outputs"), list):
            model["outputs"] = ["lm" if output == "words" else output for output in model["outputs"]]
        migrated["model"] = model
    if isinstance(migrated.get("data"), dict):
        migrated["data"] = _migrate_data(migrated["data"])
    return migrated


def migrate_name(name: str) -> str:
    """Return the version 2 name of a tensor or of its int8 scales."""
    prefix = next((prefix for prefix in TENSOR_PREFIXES if name.startswith(prefix)), None)
    return name if prefix is None else TENSOR_PREFIXES[prefix] + name.removeprefix(prefix)


def _migrate_data(data: Mapping[str, Any]) -> dict[str, Any]:
    migrated = _rename_pooling(_rename_keys(data, DATA))
    for split in ("train", "valid", "test"):
        corpora = migrated.get(split)
        if isinstance(corpora, list):
            migrated[split] = [_rename_keys(each, CORPUS) if isinstance(each, dict) else each for each in corpora]
        elif isinstance(corpora, dict):
            migrated[split] = _rename_keys(corpora, CORPUS)
    return migrated


def _rename_pooling(data: dict[str, Any]) -> dict[str, Any]:
    return data | {"pooling": "cls"} if data.get("pooling") == "class" else data


def _rename_keys(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in data.items()}
