"""What a model folder holds, told without reading its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.checkpoint.card import Card, read_card
from clearhead.checkpoint.folder import CARD, CONFIG, read_settings, weight_files
from clearhead.checkpoint.tensors import open_tensors
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.files import read_text
from clearhead.text import Tokenizer


@dataclass(frozen=True)
class ModelFolderInfo:
    """A model folder at a glance."""

    folder: Path
    config: ModelConfig
    tokenizers: tuple[Tokenizer, ...]
    extra: dict[str, Any]  # whatever else config.json says: the task, names of labels
    card: Card
    weight_bytes: int  # of the files
    stored_as: str  # the number format of most of them, as safetensors calls it: F32, BF16, I8


def model_folder_info(folder: Path) -> ModelFolderInfo:
    """Read everything but the numbers."""
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} is no model folder ({CONFIG} is missing); check the path")
    names = {path.name for path in folder.iterdir()}
    config, tokenizers, extra = read_settings(folder, names)
    card = read_card(read_text(folder / CARD)) if CARD in names else Card()
    files = [folder / name for name in weight_files(folder, names)]
    return ModelFolderInfo(
        folder, config, tokenizers, extra, card, sum(path.stat().st_size for path in files), _stored_as(files)
    )


def _stored_as(files: list[Path]) -> str:
    """The number format that holds most of the numbers."""
    counts: dict[str, int] = {}
    for path in files:
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                part = file.get_slice(name)
                size = 1
                for length in part.get_shape():
                    size *= length
                counts[part.get_dtype()] = counts.get(part.get_dtype(), 0) + size
    return max(counts, key=lambda kind: counts[kind], default="")
