"""Whether a run that goes on is still the same run: its settings and its vocabulary."""

import hashlib
import json
from typing import Any

from clearhead.config.recipe import Recipe
from clearhead.data import Data

# What may differ when a run goes on: how it is done and watched, not what is learned.
FREE = {
    "train": {"steps", "validate_every", "save_every", "log_every", "keep", "patience", "scored", "average"}
    | {"device", "compile", "recompute", "parallel", "accumulation"},
    "data": {"workers", "cache", "test", "published"},
}


def comparable(recipe: Recipe) -> dict[str, Any]:
    """What must be the same when a run goes on."""
    whole = recipe.model_dump(mode="json")
    for group, names in FREE.items():
        whole[group] = {key: value for key, value in whole[group].items() if key not in names}
    return whole


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The settings that differ, as `train.lr: 0.1 is now 0.2`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and isinstance((*old, 0)[0], dict):
        return [line for n, both in enumerate(zip(old, new, strict=True)) for line in differences(*both, f"{path}.{n}")]
    return [] if old == new else [f"{path}: {json.dumps(old)} is now {json.dumps(new)}"]


def vocabulary(data: Data) -> str:
    """A digest of the tokenizers and labels: a model means nothing without them."""
    parts = [each.engine.to_str() for each in data.tokenizers] + list(data.labels)
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()
