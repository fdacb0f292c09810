"""Summary of a model folder, without loading its weights."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.checkpoint.card import Card, read_card
from clearhead.checkpoint.model_folder import CARD, CONFIG, read_settings, read_unchanged, weight_files
from clearhead.checkpoint.tensors import open_tensors
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.files import read_text
from clearhead.text import Tokenizer


@dataclass(frozen=True)
class ModelFolderInfo:
    """Settings, model card and size of a model folder."""

    folder: Path
    config: ModelConfig
    tokenizers: tuple[Tokenizer, ...]
    extra: dict[str, Any]  # all other keys of config.json: task, labels, data …
    card: Card
    weight_bytes: int  # size of the weight files
    stored_as: str  # safetensors dtype of most numbers: F32, BF16, I8


def model_folder_info(folder: Path) -> ModelFolderInfo:
    """Read everything but the weights, whose files are only opened."""
    return read_unchanged(folder, _read_info)


def _read_info(folder: Path) -> ModelFolderInfo:
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} is not a model folder ({CONFIG} is missing); check the path")
    names = {path.name for path in folder.iterdir()}
    config, tokenizers, extra = read_settings(folder, names)
    card = read_card(read_text(folder / CARD)) if CARD in names else Card()
    files = [folder / name for name in weight_files(folder, names)]
    return ModelFolderInfo(
        folder, config, tokenizers, extra, card, sum(path.stat().st_size for path in files), _most_common_dtype(files)
    )


def _most_common_dtype(files: list[Path]) -> str:
    """Return the dtype of most numbers."""
    counts: dict[str, int] = {}
    for path in files:
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_slice(name)
                dtype = tensor.get_dtype()
                numbers = math.prod(tensor.get_shape()) * (2 if dtype == "U8" else 1)  # int4: two in a byte
                counts[dtype] = counts.get(dtype, 0) + numbers
    return max(counts, key=lambda dtype: counts[dtype], default="")
