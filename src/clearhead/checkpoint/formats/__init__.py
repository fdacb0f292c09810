"""Import and export of other libraries' models, one module per format."""

from collections.abc import Callable
from pathlib import Path

import torch

from clearhead.checkpoint import disk
from clearhead.checkpoint.formats import ctranslate2, ctranslate2_write, gguf, gguf_write, huggingface, llama2c, onnx
from clearhead.checkpoint.formats.imported_model import ImportedModel
from clearhead.checkpoint.model_folder import CONFIG, LoadedModel
from clearhead.errors import UserError
from clearhead.files import open_regular
from clearhead.ops.linear.quantized_tensor import dequantize_network

__all__ = ["EXPORTS", "ImportedModel", "check_new_folder", "export_model", "import_model", "read_foreign"]

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
        inside = list(source.glob("*.gguf")) if source.is_dir() else []
        if len(inside) == 1:
            source = inside[0]
        if len(inside) > 1:
            names = ", ".join(sorted(path.name for path in inside)[:5])
            raise UserError(f"{source} has {len(inside)} GGUF files: {names}; name one of them")
        if source.is_dir() and any(path.name.endswith(huggingface.PICKLES) for path in source.iterdir()):
            pickled = min(path for path in source.iterdir() if path.name.endswith(huggingface.PICKLES))
            raise UserError(huggingface.pickle_refused(pickled))
        if (source / huggingface.PEFT_CONFIG).is_file():
            raise UserError(huggingface.adapter_refused(source))
        if source.is_dir() and any(source.glob("*.safetensors")):
            raise UserError(f"{source / CONFIG} is missing; copy or fetch it, too")
        if source.is_file() and gguf.is_gguf(source):
            return gguf.read(source)
        if source.is_file() and _is_pickle(source):
            raise UserError(huggingface.pickle_refused(source))
        if source.is_file() and source.suffix == ".bin":
            return llama2c.read(source)
        if source.is_file() and source.suffix == ".safetensors":
            raise UserError(f"{source} is only the weights of a model; give its folder, with config.json")
    raise UserError(
        f"{source} is in an unknown format; supported: a folder of Hugging Face (config.json) or "
        "CTranslate2 (model.bin), a file (or a folder with one) of llama.cpp (GGUF) or llama2.c (.bin)"
    )


def _is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, plain or in the zip archive that torch.save writes."""
    with open_regular(path) as file:
        start = file.read(2)
    is_protocol = len(start) == 2 and start[0] == 0x80 and start[1] <= 5  # PROTO opcode
    return is_protocol or (start == b"PK" and path.name.endswith(huggingface.PICKLES))


def import_model(source: Path, folder: Path, dtype: torch.dtype | None = None, replace: bool = False) -> None:
    """Convert a model of another library to a new model folder; `replace` allows one that exists."""
    check_new_folder(folder, replace)
    read_foreign(source).save(folder, source.name, dtype)


def export_model(loaded: LoadedModel, folder: Path, to: str, replace: bool = False) -> None:
    """Write a model for another library into a new folder, atomically; `replace` allows one that exists."""
    if to not in EXPORTS:
        raise UserError(f"--to: {to!r:.40} is not allowed; use {', '.join(EXPORTS)}")
    check_new_folder(folder, replace)
    dequantize_network(loaded.network)  # other libraries have their own layouts
    with disk.atomic_folder(folder) as temporary:
        EXPORTS[to](loaded, temporary)


def check_new_folder(folder: Path, replace: bool = False, by_command: bool = False) -> None:
    """Refuse a folder with files; `replace` allows one that was written here, which its manifest shows.

    `by_command`: the message names the option of the command line.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not replace and by_command:
        raise UserError(f"{folder} already exists; give a new folder, or replace it with --force")
    if not replace:
        raise UserError(f"{folder} already exists; delete it, or choose another folder")
    if not disk.has_file(folder, disk.MANIFEST):
        raise UserError(f"{folder} has no {disk.MANIFEST}, so it is not a model of ours; give a new folder")
