"""Model folders: config.json, model.safetensors, tokenizer.json, README.md, and a manifest that detects damage."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Engine
from torch import Tensor

from clearhead.checkpoint import disk
from clearhead.checkpoint.int8_storage import narrowed, widened
from clearhead.checkpoint.tensors import all_names, check_fit, read_tensors, save_tensors, tensors_of
from clearhead.checkpoint.version1 import migrate_config, migrate_weights
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model import Network, build
from clearhead.text import Tokenizer

FORMAT, VERSION, OLDER = "clearhead", 2, (1,)
CONFIG, CARD = "config.json", "README.md"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ONE, TWO = ("tokenizer.json",), ("tokenizer.source.json", "tokenizer.target.json")
SHARD_BYTES = 4_000_000_000
ATTEMPTS = 5  # readings of a folder that someone keeps replacing


@dataclass(frozen=True)
class Loaded:
    """What a model folder holds; the network is in evaluation mode."""

    network: Network
    config: ModelConfig
    tokenizers: tuple[Tokenizer, ...]  # one, or that of the source and that of the target; none if it came without
    extra: dict[str, Any]  # whatever else config.json says: the task, names of labels


def save_model(
    folder: Path,
    network: Network,
    tokenizers: Tokenizer | Iterable[Tokenizer],
    extra: Mapping[str, Any] | None = None,
    card: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model folder, or replace one, whole or not at all; `dtype` is what the weights are stored in.

    Stored as torch.int8, matrices have a scale for each row, and are fp32 again when loaded.

    `tokenizers` is one, or that of the source and that of the target. Files that others put into the folder stay.
    """
    tokenizers = (tokenizers,) if isinstance(tokenizers, Tokenizer) else tuple(tokenizers)
    config, extra = network.config, dict(extra or {})
    if taken := {"format", "version", "model"} & extra.keys():
        raise ValueError(f"extra: {', '.join(sorted(taken))} is config.json's own; use another name")
    tensors = tensors_of(network)
    try:
        check_fit(tensors_of(build(config, "meta")), tensors, "network")
    except UserError as error:
        raise ValueError(f"a model folder holds what its config describes, but {error}") from None
    _check_tokenizers(tokenizers, config, folder)
    _check_place(folder)
    with disk.written(folder) as draft:
        disk.write_json(
            draft / CONFIG, {"format": FORMAT, "version": VERSION, "model": config.model_dump(mode="json")} | extra
        )
        write_tokenizers(draft, [tokenizer.engine for tokenizer in tokenizers])
        if card is not None:
            disk.write_text(draft / CARD, card)
        if dtype == torch.int8:
            tensors, dtype = narrowed(tensors), None
        save_weights(draft, tensors, dtype)


def write_tokenizers(draft: Path, engines: Sequence[Engine]) -> None:
    """tokenizer.json, or those of the source and the target; nothing where there is none."""
    for name, engine in zip(TWO if len(engines) == 2 else ONE, engines, strict=False):
        disk.write_text(draft / name, engine.to_str(pretty=False))


def with_weights(config: ModelConfig, weights: Mapping[str, Tensor], where: Path | str = "weights") -> Network:
    """The network of a config, in evaluation mode, with these tensors as its weights."""
    network = build(config, "meta")
    check_fit(tensors_of(network), weights, where)
    network.load_state_dict({name: weights[stored] for name, stored in all_names(network).items()}, assign=True)
    return network.eval()


def load_model(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, verify: bool = True
) -> Loaded:
    """Read a model folder; `dtype` turns the weights into another kind, `verify=False` leaves the checksums out.

    On a CPU and without a dtype, the weights stay in the file until they are touched.
    """
    for _ in range(ATTEMPTS):
        place = disk.present(folder)
        before = _stamp(place)
        try:
            loaded = _load(place, device, dtype, verify)
        except UserError:
            if _stamp(disk.present(folder)) == before:
                raise
        else:
            if _stamp(disk.present(folder)) == before:  # else files of two models may have been mixed
                return loaded
    raise UserError(f"{folder} is being replaced all the time; try again when nobody writes it")


def _load(folder: Path, device: torch.device | str, dtype: torch.dtype | None, verify: bool) -> Loaded:
    names = _names(folder, verify)
    config, tokenizers, extra = read_settings(folder, names)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder, names):
        found = migrate_weights(widened(read_tensors(folder / file, device), folder / file))
        tensors |= {name: tensor.to(_kind(tensor, dtype)) for name, tensor in found.items()}
    network = with_weights(config, tensors, folder / WEIGHTS)
    return Loaded(network, config, tokenizers, extra)


def read_settings(folder: Path, names: set[str]) -> tuple[ModelConfig, tuple[Tokenizer, ...], dict[str, Any]]:
    """All but the weights of a model folder with these files: architecture, tokenizers, what else config.json says."""
    data = disk.read_json(folder / CONFIG)
    _check_format(data, folder)
    if data["version"] == 1:
        data = migrate_config(data)
    config = ModelConfig.build(data.pop("model", None), where=f"{folder / CONFIG}: model")
    files = next((files for files in (ONE, TWO) if set(files) <= names), ())
    tokenizers = tuple(Tokenizer.load(folder / name) for name in files)
    _check_tokenizers(tokenizers, config, folder)
    return config, tokenizers, {key: value for key, value in data.items() if key not in ("format", "version")}


def _stamp(folder: Path) -> tuple[int, ...] | None:
    """Which folder it is that has this name now; a replaced one is another."""
    try:
        state = folder.stat()
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_mtime_ns


def _names(folder: Path, verify: bool) -> set[str]:
    """The files of a model folder, checked against the manifest."""
    if not folder.is_dir():
        raise UserError(f"{folder} is {'a file' if folder.exists() else 'not there'}; give a model folder")
    if not (folder / CONFIG).exists() and not (folder / disk.MANIFEST).exists():
        raise UserError(f"{folder} is no model folder ({CONFIG} is missing); check the path")
    if not verify or not (folder / disk.MANIFEST).exists():
        _check_format(disk.read_json(folder / CONFIG), folder)  # a foreign folder has no manifest: say that it is one
    try:
        names = disk.verify(folder) if verify else {path.name for path in folder.iterdir()}
    except UserError as error:
        raise UserError(f"{error}; copy or fetch the model folder again") from None
    if CONFIG not in names:
        raise UserError(f"{folder / disk.MANIFEST} does not list {CONFIG}; copy or fetch the model folder again")
    return names


def _check_format(data: dict[str, Any], folder: Path) -> None:
    if data.get("format") != FORMAT:
        raise UserError(f"{folder / CONFIG} is not of Clearhead's format; turn a foreign model with `clearhead import`")
    if data.get("version") not in (VERSION, *OLDER):
        raise UserError(
            f"{folder / CONFIG}: version {data.get('version')!r:.20}, but this Clearhead reads {VERSION}; update it"
        )


def _check_tokenizers(tokenizers: tuple[Tokenizer, ...], config: ModelConfig, folder: Path) -> None:
    if len(tokenizers) > 2:
        raise ValueError(f"tokenizers: {len(tokenizers)}; give one, or that of the source and that of the target")
    sizes = (config.source_vocab, config.target_vocab)
    for tokenizer, size in zip((tokenizers * 2)[:2], sizes, strict=False):
        if len(tokenizer) > size:
            raise UserError(f"{folder}: the tokenizer has {len(tokenizer):,} tokens, but the model only {size:,}")


def _check_place(folder: Path) -> None:
    """Never clear away a folder that is no model."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder")
    ours = (folder / CONFIG).exists() and (folder / disk.MANIFEST).exists()
    if folder.is_dir() and not ours and any(folder.iterdir()):
        raise UserError(f"{folder} holds something that is no model; give a new folder, or an empty one")


def save_weights(draft: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """One file, or several of at most SHARD_BYTES (a larger tensor has its own) with the index that others know."""
    sizes = {name: tensor.numel() * _kind(tensor, dtype).itemsize for name, tensor in tensors.items()}
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [WEIGHTS]
    else:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        disk.write_json(draft / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})
    for file, names in zip(files, shards, strict=True):
        save_tensors(draft / file, {name: tensors[name].to(_kind(tensors[name], dtype)) for name in names})


def weight_files(folder: Path, names: set[str]) -> list[str]:
    """The files that hold the weights of a model folder with these files: one, or those that its index names."""
    if WEIGHTS in names:
        return [WEIGHTS]
    if INDEX not in names:
        raise UserError(f"{folder / WEIGHTS} is missing; copy or fetch the model folder again")
    where = disk.read_json(folder / INDEX).get("weight_map")
    files = list(dict.fromkeys(map(str, where.values()))) if isinstance(where, dict) else []
    if not files or not names.issuperset(files):
        raise UserError(f"{folder / INDEX} names files that are missing; copy or fetch the model folder again")
    return files


def _kind(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor is turned into: counts stay counts."""
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
