"""Import and export of other libraries' models, one module per format."""

from collections.abc import Callable
from pathlib import Path

import torch

from clearhead.checkpoint import disk
from clearhead.checkpoint.formats import ctranslate2, ctranslate2_write, gguf, gguf_write, huggingface, llama2c, onnx
from clearhead.checkpoint.formats.imported_model import ImportedModel
from clearhead.checkpoint.model_folder import LoadedModel
from clearhead.errors import UserError

__all__ = ["EXPORTS", "ImportedModel", "export_model", "import_model", "read_foreign"]

EXPORTS: dict[str, Callable[[LoadedModel, Path], None]] = {
    "hf": huggingface.write,
    "gguf": gguf_write.write_f16,
    "gguf-q8_0": gguf_write.write_q8_0,
    "ctranslate2": ctranslate2_write.write,
    "onnx": onnx.write,
}


def read_foreign(source: Path) -> ImportedModel:
    """Read a model of another library; the format is detected."""
    with disk.read_errors(source):
        if ctranslate2.is_folder(source):
            return ctranslate2.read(source)
        if huggingface.is_folder(source):
            return huggingface.read(source)
        if not source.exists():
            raise UserError(f"{source} does not exist; check the path")
        if source.is_file() and gguf.is_gguf(source):
            return gguf.read(source)
        if source.is_file() and source.suffix == ".bin":
            return llama2c.read(source)
    raise UserError(
        f"{source} is in an unknown format; supported: a folder of Hugging Face (config.json) or "
        "CTranslate2 (model.bin), a file of llama.cpp (GGUF) or llama2.c (.bin)"
    )


def import_model(source: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Convert a model of another library to a new model folder."""
    _check_new(folder)
    read_foreign(source).save(folder, source.name, dtype)


def export_model(loaded: LoadedModel, folder: Path, to: str) -> None:
    """Write a model for another library into a new folder, atomically."""
    if to not in EXPORTS:
        raise UserError(f"--to: {to!r:.40} is not allowed; use {', '.join(EXPORTS)}")
    _check_new(folder)
    with disk.atomic_folder(folder) as temporary:
        EXPORTS[to](loaded, temporary)


def _check_new(folder: Path) -> None:
    """Refuse to replace files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists; give a new folder, or an empty one")
