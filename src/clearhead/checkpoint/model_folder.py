"""Model folders: config.json, model.safetensors, tokenizer.json, README.md, and a manifest that detects damage."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer as Engine
from torch import Tensor

from clearhead.checkpoint import disk
from clearhead.checkpoint.int8_storage import (
    PART_SUFFIXES,
    from_int8_storage,
    plain,
    to_group_storage,
    to_int8_storage,
)
from clearhead.checkpoint.tensors import (
    check_fit,
    named_tensors,
    read_tensors,
    save_tensors,
    stored_names,
    to_one_dtype,
)
from clearhead.checkpoint.version1 import migrate_config, migrate_name
from clearhead.config import ModelConfig
from clearhead.config.extra import checked_extra
from clearhead.errors import UserError
from clearhead.model import Network, build
from clearhead.text import Tokenizer

FORMAT, VERSION, OLDEST_VERSION = "clearhead", 2, 1
CONFIG, CARD = "config.json", "README.md"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARED_TOKENIZER, SEPARATE_TOKENIZERS = ("tokenizer.json",), ("tokenizer.source.json", "tokenizer.target.json")
SHARD_BYTES = 4_000_000_000
FREE_ATTEMPTS, MAX_ATTEMPTS = 5, 20  # at reading a folder that others keep replacing; after the free ones, they wait
A = TypeVar("A")


@dataclass(frozen=True)
class LoadedModel:
    """The contents of a model folder; the network is in evaluation mode."""

    network: Network
    config: ModelConfig
    tokenizers: tuple[Tokenizer, ...]  # one shared, source and target, or none
    extra: dict[str, Any]  # all other keys of config.json: task, labels, data …


def save_model(
    folder: Path,
    network: Network,
    tokenizers: Tokenizer | Iterable[Tokenizer],
    extra: Mapping[str, Any] | None = None,
    card: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write or replace a model folder atomically, keeping files that users added.

    `tokenizers` is one, or source and target. `dtype` is the storage dtype: torch.int8 stores matrices with a scale per
    row and dequantizes them to fp32 on load. Without it, weights that are quantized in memory are stored as they are.
    """
    tokenizers = (tokenizers,) if isinstance(tokenizers, Tokenizer) else tuple(tokenizers)
    config, extra = network.config, dict(extra or {})
    if taken := {"format", "version", "model"} & extra.keys():
        raise ValueError(f"extra: {', '.join(sorted(taken))} is a key of config.json itself; use another name")
    tensors = named_tensors(network)
    try:
        check_fit(named_tensors(build(config, "meta")), tensors, "network")
    except UserError as error:
        raise ValueError(f"the network does not match its config: {error}") from None
    _check_tokenizers(tokenizers, config, folder)
    with disk.atomic_folder(folder, _check_replaceable) as temporary:
        settings = {"format": FORMAT, "version": VERSION, "model": config.model_dump(mode="json")}
        disk.write_json(temporary / CONFIG, settings | extra)
        write_tokenizers(temporary, [tokenizer.engine for tokenizer in tokenizers])
        if card is not None:
            disk.write_text(temporary / CARD, card)
        if dtype == torch.int8:
            tensors, dtype = to_int8_storage(tensors), None
        tensors = to_group_storage(tensors, dtype)
        save_weights(temporary, tensors, dtype)


def write_tokenizers(folder: Path, engines: Sequence[Engine]) -> None:
    """Write tokenizer.json, or one file each for source and target."""
    for name, engine in zip(SEPARATE_TOKENIZERS if len(engines) == 2 else SHARED_TOKENIZER, engines, strict=False):
        disk.write_text(folder / name, engine.to_str(pretty=False))


def build_with_weights(config: ModelConfig, weights: Mapping[str, Tensor], where: Path | str = "weights") -> Network:
    """Build the network of a config from these tensors, in evaluation mode."""
    network = meta_network(config, weights, where)
    check_fit(named_tensors(network), weights, where)
    network.load_state_dict({name: weights[stored] for name, stored in stored_names(network).items()}, assign=True)
    return network.eval()


def meta_network(config: ModelConfig, tensors: Mapping[str, Tensor], where: object) -> Network:
    """Build a network on the meta device, unless the config has more layers than there are tensors."""
    if config.encoder_layers + config.decoder_layers > len(tensors):
        raise UserError(f"{where}: {len(tensors):,} tensors, fewer than the model has layers; is the file complete?")
    return build(config, "meta")


def load_model(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, verify: bool = True
) -> LoadedModel:
    """Read a model folder; `dtype` converts the weights, `verify=False` skips the checksums.

    On a CPU without a dtype, weight files above `COPIED_BYTES` are memory-mapped: a program that then truncates such a
    file in place, instead of replacing it as every save does, ends this process with SIGBUS.
    """
    return read_unchanged(folder, partial(_load, device=device, dtype=dtype, verify=verify))


def read_unchanged(folder: Path, read: Callable[[Path], A]) -> A:
    """Return `read(path)` of a folder, read again if another process replaced the folder meanwhile."""
    for attempt in range(MAX_ATTEMPTS):
        parent = Path(os.path.realpath(folder)).parent
        with disk.writers_turn(parent) if attempt >= FREE_ATTEMPTS else nullcontext():
            before = path, _ = _find(folder)
            try:
                with disk.read_errors(path):
                    result = read(path)
            except UserError:
                if _find(folder) == before:
                    raise
            else:
                if _find(folder) == before:  # else files of two models may be mixed
                    return result
    raise UserError(f"{folder} is being replaced continuously; try again when no process is writing it")


def _load(folder: Path, device: torch.device | str, dtype: torch.dtype | None, verify: bool) -> LoadedModel:
    names = _file_names(folder, verify)
    config, tokenizers, extra = read_settings(folder, names)
    migrate = format_version(folder) == 1
    weights: dict[str, Tensor] = {}
    for file in weight_files(folder, names):
        tensors = from_int8_storage(read_tensors(folder / file, device), folder / file)
        for name, tensor in tensors.items():
            tensor = tensor if dtype is None else plain(tensor)
            weights[migrate_name(name) if migrate else name] = tensor.to(_stored_dtype(tensor, dtype))
    network = build_with_weights(config, to_one_dtype(weights, folder / WEIGHTS), folder / WEIGHTS)
    return LoadedModel(network, config, tokenizers, extra)


def read_settings(folder: Path, names: set[str]) -> tuple[ModelConfig, tuple[Tokenizer, ...], dict[str, Any]]:
    """Return the config, tokenizers and all other keys of config.json; `names` are the folder's files."""
    data = disk.read_json(folder / CONFIG)
    _check_format(data, folder)
    if data["version"] == 1:
        data = migrate_config(data)
    config = ModelConfig.build(data.pop("model", None), where=f"{folder / CONFIG}: model")
    files = next((files for files in (SHARED_TOKENIZER, SEPARATE_TOKENIZERS) if set(files) <= names), ())
    tokenizers = tuple(Tokenizer.load(folder / name) for name in files)
    _check_tokenizers(tokenizers, config, folder)
    extra = {key: value for key, value in data.items() if key not in ("format", "version")}
    return config, tokenizers, checked_extra(extra, str(folder / CONFIG))


def format_version(folder: Path) -> int:
    """Return the format version of a model folder."""
    data = disk.read_json(folder / CONFIG)
    _check_format(data, folder)
    version: int = data["version"]
    return version


def _find(folder: Path) -> tuple[Path, tuple[int, ...] | None]:
    """Return where a folder is now, and what identifies it; a replacement has another identity."""
    for _ in range(MAX_ATTEMPTS):
        path = disk.current_path(folder)
        with suppress(OSError):  # it was moved after we looked, or there is none
            status = path.stat()
            return path, (status.st_dev, status.st_ino, status.st_mtime_ns)
    return folder, None


def _file_names(folder: Path, verify: bool) -> set[str]:
    """Return the files of a model folder, checked against the manifest if `verify`."""
    if not folder.is_dir():
        raise UserError(f"{folder} {'is a file' if folder.exists() else 'does not exist'}; give a model folder")
    if not (folder / CONFIG).exists() and not (folder / disk.MANIFEST).exists():
        raise UserError(f"{folder} is not a model folder ({CONFIG} is missing); check the path")
    if not verify or not (folder / disk.MANIFEST).exists():
        _check_format(disk.read_json(folder / CONFIG), folder)  # first: folders of other libraries have no manifest
    try:
        names = disk.verify(folder) if verify else {path.name for path in folder.iterdir()}
    except UserError as error:
        raise UserError(f"{error}; copy or fetch the model folder again") from None
    if CONFIG not in names:
        raise UserError(f"{folder / disk.MANIFEST} does not list {CONFIG}; copy or fetch the model folder again")
    return names


def _check_format(data: dict[str, Any], folder: Path) -> None:
    if data.get("format") != FORMAT:
        raise UserError(f"{folder / CONFIG}: not a Clearhead model; convert other formats with `clearhead import`")
    version = data.get("version")
    if type(version) is not int or version < OLDEST_VERSION:
        raise UserError(
            f"{folder / CONFIG}: version {version!r:.20} is unknown; this Clearhead reads {OLDEST_VERSION} to {VERSION}"
        )
    if version > VERSION:
        raise UserError(
            f"{folder / CONFIG}: format version {version!r:.20} is newer than this Clearhead reads "
            f"({OLDEST_VERSION} to {VERSION}); update Clearhead"
        )


def _check_tokenizers(tokenizers: tuple[Tokenizer, ...], config: ModelConfig, folder: Path) -> None:
    if len(tokenizers) > 2:
        raise ValueError(f"tokenizers: {len(tokenizers)}; give one, or source and target")
    sizes = (config.source_vocab, config.target_vocab)
    for tokenizer, size in zip((tokenizers * 2)[:2], sizes, strict=False):
        if len(tokenizer) > size:
            raise UserError(f"{folder}: the tokenizer has {len(tokenizer):,} tokens, but the model only {size:,}")


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace anything but a model folder."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder")
    is_model = (folder / CONFIG).exists() and (folder / disk.MANIFEST).exists()
    if folder.is_dir() and not is_model and any(folder.iterdir()):
        raise UserError(f"{folder} contains files that are not a model; give a new or empty folder")


def save_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Write one file, or shards of at most SHARD_BYTES (a larger tensor has its own) with Hugging Face's index."""
    sizes = {name: tensor.numel() * _stored_dtype(tensor, dtype).itemsize for name, tensor in tensors.items()}
    shards: list[list[str]] = [[]]
    free = SHARD_BYTES
    for name, size in sizes.items():
        # A shard has the scales of its matrices.
        is_scale = any(name.removesuffix(suffix) in shards[-1] for suffix in PART_SUFFIXES if name.endswith(suffix))
        if size > free and shards[-1] and not is_scale:
            shards.append([])
            free = SHARD_BYTES
        shards[-1].append(name)
        free -= size
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [WEIGHTS]
    else:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        disk.write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    for file, names in zip(files, shards, strict=True):
        save_tensors(folder / file, {name: tensors[name].to(_stored_dtype(tensors[name], dtype)) for name in names})


def weight_files(folder: Path, names: set[str]) -> list[str]:
    """Return the weight files of a model folder: one, or the shards in its index; `names` are the folder's files."""
    if WEIGHTS in names:
        return [WEIGHTS]
    if INDEX not in names:
        raise UserError(f"{folder / WEIGHTS} is missing; copy or fetch the model folder again")
    weight_map = disk.read_json(folder / INDEX).get("weight_map")
    files = list(dict.fromkeys(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    if not files or not names.issuperset(files):
        missing = next((file for file in files if file not in names), "none")
        raise UserError(
            f"{folder / INDEX} names files that are missing ({missing:.60}); copy or fetch the model folder again"
        )
    return files


def _stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype to convert a tensor to; integers keep theirs."""
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
