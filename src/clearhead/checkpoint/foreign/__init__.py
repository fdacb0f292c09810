"""Models of other libraries, in and out: one small adapter for each format."""

from pathlib import Path

import torch

from clearhead.checkpoint.foreign import huggingface
from clearhead.checkpoint.foreign.imported import Imported
from clearhead.errors import UserError

__all__ = ["Imported", "import_model", "read_foreign"]


def read_foreign(source: Path) -> Imported:
    """The model in a foreign file or folder, whichever format it is."""
    if huggingface.is_folder(source):
        return huggingface.read(source)
    if not source.exists():
        raise UserError(f"{source} does not exist; check the path")
    raise UserError(f"{source} is of no known format; known: a folder of Hugging Face (config.json)")


def import_model(source: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Turn a foreign model into a model folder."""
    read_foreign(source).save(folder, source.name, dtype)
