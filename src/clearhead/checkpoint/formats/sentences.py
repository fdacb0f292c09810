"""Sentence encoders as sentence-transformers keeps them: how the vectors of the tokens become one of the text."""

import json
import re
from pathlib import Path
from typing import Any

from clearhead.checkpoint import disk
from clearhead.checkpoint.folder import CONFIG, Loaded
from clearhead.checkpoint.formats.fields import Fields
from clearhead.errors import UserError
from clearhead.files import read_text

MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}  # ours to theirs
NEWER = {"mean": "mean", "cls": "cls"}  # their newer words to ours
PARTS = ["Transformer", "Pooling", "Normalize"]
MODULES, POOLING, LENGTH = "modules.json", "1_Pooling", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"


def read_pooling(folder: Path) -> dict[str, Any]:
    """What a folder says of it, for our config.json: `pooling`, `normalized`, `longest`."""
    if not (folder / MODULES).is_file():
        return {}
    parts = re.findall(r'"type": *"(?:\w+\.)*(\w+)"', read_text(folder / MODULES))
    if parts not in (PARTS, PARTS[:2]):
        raise UserError(
            f"{folder / MODULES}: {', '.join(parts):.80}: cannot be represented here; {', '.join(PARTS)} can"
        )
    settings = _fields(folder / POOLING / CONFIG)
    modes = [key for key, value in settings.data.items() if key.startswith("pooling_mode_") and value is True]
    pooling = next((name for name, key in MODES.items() if modes == [key]), None)
    pooling = pooling or NEWER.get(settings.text("pooling_mode", ""))
    if pooling is None:
        raise UserError(f"{settings.where}: pooling other than the mean or the first token cannot be represented here")
    found: dict[str, Any] = {"pooling": pooling, "normalized": parts == PARTS}
    _fields(folder / PROMPTS).must("a prompt before every text", "default_prompt_name")
    length = _fields(folder / LENGTH)
    length.must("lower case before the tokenizer", "do_lower_case", False)
    if length.has("max_seq_length"):
        found["max_length"] = length.whole("max_seq_length")
    return found


def write_pooling(loaded: Loaded, draft: Path) -> None:
    """The same for an encoder without a head, imported or trained by us."""
    extra, config = loaded.extra, loaded.config
    pooling = extra.get("pooling", (extra.get("data") or {}).get("pooling"))
    if config.family != "encoder" or config.outputs or pooling is None:
        return
    parts = PARTS if extra.get("normalized", True) else PARTS[:2]
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{part}" if n else "", "type": f"sentence_transformers.models.{part}"}
        for n, part in enumerate(parts)
    ]
    disk.write_text(draft / MODULES, json.dumps(modules, indent=2) + "\n")
    (draft / POOLING).mkdir()
    modes = {key: name == pooling for name, key in MODES.items()}
    disk.write_json(draft / POOLING / CONFIG, {"word_embedding_dimension": config.dim} | modes)
    disk.write_json(draft / LENGTH, {"max_seq_length": extra.get("max_length", config.max_positions)})


def _fields(path: Path) -> Fields:
    return Fields(disk.read_json(path) if path.is_file() else {}, path)
