"""Whether a resumed run has the same settings and vocabulary."""

import hashlib
import json
from pathlib import Path
from typing import Any

from clearhead.config.recipe import Recipe
from clearhead.data import Data
from clearhead.errors import UserError

MAX_SHOWN = 10  # changed settings in an error
MAX_CHARS = 200  # of a key or value in an error

# Settings that may differ on resume: they do not change what is learned.
MAY_CHANGE = {
    "train": {"steps", "validate_every", "save_every", "log_every", "keep_checkpoints", "patience", "eval_samples"}
    | {"average_checkpoints", "device", "compile", "activation_checkpointing", "parallel", "grad_accum"},
    "data": {"workers", "cache_dir", "test", "source_url", "target_language"},
}


def comparable(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that must be the same on resume."""
    settings = recipe.model_dump(mode="json")
    for group, names in MAY_CHANGE.items():
        settings[group] = {key: value for key, value in settings[group].items() if key not in names}
    return settings


def check_same_settings(run: Path, old: Any, new: Any) -> None:
    """Refuse to resume a run that was started with other settings."""
    if changed := differences(old, new):
        shown = [*changed[:MAX_SHOWN], *([f"{len(changed) - MAX_SHOWN} more"] if len(changed) > MAX_SHOWN else [])]
        raise UserError(
            f"{run}: this run was started with other settings ({'; '.join(shown)}); use the same, or start another run"
        )


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the settings that differ, as `train.lr: 0.1 is now 0.2`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [
            line
            for key in keys
            for line in differences(old.get(key), new.get(key), f"{path}.{_short(key)}".lstrip("."))
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and isinstance((*old, 0)[0], dict):
        return [line for n, pair in enumerate(zip(old, new, strict=True)) for line in differences(*pair, f"{path}.{n}")]
    return [] if old == new else [f"{path}: {_json(old)} is now {_json(new)}"]


def _json(value: Any) -> str:
    try:
        return _short(json.dumps(value))
    except RecursionError:
        return "a deeply nested value"


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"


def vocabulary(data: Data) -> str:
    """Return a digest of the tokenizers and labels."""
    parts = [tokenizer.engine.to_str() for tokenizer in data.tokenizers] + list(data.labels)
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()
