"""Pooling settings of sentence-transformers folders, in both directions."""

import json
import re
from pathlib import Path
from typing import Any

from clearhead.checkpoint import disk
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.model_folder import CONFIG, LoadedModel
from clearhead.errors import UserError
from clearhead.files import read_text

MODE_KEYS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}  # our pooling to their key
POOLINGS = ("mean", "cls")  # values of the newer key pooling_mode
MODULE_TYPES = ["Transformer", "Pooling", "Normalize"]
MODULES, POOLING, MAX_LENGTH = "modules.json", "1_Pooling", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"


def read_pooling(folder: Path) -> dict[str, Any]:
    """Return `pooling`, `normalized` and `max_length` for our config.json, or {}."""
    if not (folder / MODULES).is_file():
        return {}
    types = re.findall(r'"type": *"(?:\w+\.)*(\w+)"', read_text(folder / MODULES))
    if types not in (MODULE_TYPES, MODULE_TYPES[:2]):
        raise UserError(
            f"{folder / MODULES}: {', '.join(types):.80}: not supported; only {', '.join(MODULE_TYPES)} are"
        )
    settings = _fields(folder / POOLING / CONFIG)
    modes = [key for key, value in settings.data.items() if key.startswith("pooling_mode_") and value is True]
    pooling = next((name for name, key in MODE_KEYS.items() if modes == [key]), None)
    if pooling is None and settings.string("pooling_mode", "") in POOLINGS:
        pooling = settings.string("pooling_mode")
    if pooling is None:
        raise UserError(f"{settings.where}: pooling other than mean or cls is not supported")
    extra: dict[str, Any] = {"pooling": pooling, "normalized": types == MODULE_TYPES}
    _fields(folder / PROMPTS).require("a prompt before each text", "default_prompt_name")
    length = _fields(folder / MAX_LENGTH)
    length.require("lowercasing before the tokenizer", "do_lower_case", False)
    if length.has("max_seq_length"):
        extra["max_length"] = length.integer("max_seq_length")
    return extra


def write_pooling(loaded: LoadedModel, folder: Path) -> None:
    """Write the pooling settings of an encoder without heads, imported or trained by us."""
    extra, config = loaded.extra, loaded.config
    pooling = extra.get("pooling", (extra.get("data") or {}).get("pooling"))
    if config.family != "encoder" or config.outputs or pooling is None:
        return
    types = MODULE_TYPES if extra.get("normalized", True) else MODULE_TYPES[:2]
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": f"sentence_transformers.models.{name}"}
        for n, name in enumerate(types)
    ]
    disk.write_text(folder / MODULES, json.dumps(modules, indent=2) + "\n")
    (folder / POOLING).mkdir()
    modes = {key: name == pooling for name, key in MODE_KEYS.items()}
    disk.write_json(folder / POOLING / CONFIG, {"word_embedding_dimension": config.dim} | modes)
    disk.write_json(folder / MAX_LENGTH, {"max_seq_length": extra.get("max_length", config.max_positions)})


def _fields(path: Path) -> Fields:
    return Fields(disk.read_json(path) if path.is_file() else {}, path)
