"""Folders of Hugging Face: config.json, safetensors in one file or several, tokenizer.json."""

import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint import disk
from clearhead.checkpoint.folder import CONFIG, FORMAT, INDEX, WEIGHTS, Loaded, save_weights, weight_files
from clearhead.checkpoint.formats.adapter import Adapter
from clearhead.checkpoint.formats.bert import BERT
from clearhead.checkpoint.formats.fields import Fields
from clearhead.checkpoint.formats.gpt import GPT1, GPT2
from clearhead.checkpoint.formats.imported import Imported
from clearhead.checkpoint.formats.llama import LLAMA
from clearhead.checkpoint.formats.marian import MARIAN, check_positions
from clearhead.checkpoint.formats.sentences import read_pooling, write_pooling
from clearhead.checkpoint.formats.tables import look_up, shapes_of, to_ours, to_theirs
from clearhead.checkpoint.formats.tokens import hugging_face_files, hugging_face_tokenizer, special_ids
from clearhead.checkpoint.tensors import read_tensors, tensors_of
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model import build

log = logging.getLogger("clearhead")
ADAPTERS = (BERT, GPT2, GPT1, LLAMA, MARIAN)
KINDS = [kind for adapter in ADAPTERS for kind in adapter.kinds]
ADAPTER = "adapter_config.json"  # of a LoRA or the like, which their library would add
TASKS = {"classes": "classification", "tags": "tagging", "span": "answering"}
# Of no consequence to what a model computes: how it was made and how their library should hold it.
ABOUT = (
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "_name_or_path"),
    *("initializer_range", "tokenizer_class", "is_encoder_decoder", "_num_labels", "num_labels", "finetuning_task"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id", "sep_token_id"),
    *("_attn_implementation_autoset", "output_past", "task_specific_params", "gradient_checkpointing"),
)
KNOWN = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
FREE = {"init", "dropout", "attention_dropout"}  # of training alone
# It always has an output bias, for which zeros will do, and may say one size of vocabulary as two.
MARIANS = {"output_bias", "vocab_size", "source_vocab_size", "target_vocab_size"}
WORDS = {"tie", "output_bias"}  # of no consequence without a head for words


def is_folder(source: Path) -> bool:
    """Whether this is a folder of Hugging Face, as far as one sees from outside."""
    return (source / CONFIG).is_file()


def read(folder: Path) -> Imported:
    """A model of a folder; what its class has and we have not is refused by name."""
    fields = Fields(disk.read_json(folder / CONFIG), folder / CONFIG)
    if fields.data.get("format") == FORMAT:
        raise UserError(f"{folder} is a model folder of ours already; use it as it is")
    adapter = adapter_of(fields)
    if (folder / ADAPTER).is_file():
        raise UserError(f"{folder / ADAPTER}: weights beside the weights cannot be represented here; merge them first")
    fields.must("quantized weights", "quantization_config")
    fields.must("code of its own", "auto_map")
    fields.ignore(*ABOUT)
    found = _tensors(folder)
    config = adapter.ours(fields, found.keys())
    if adapter is MARIAN:
        check_positions(config, found, folder)
    if unknown := fields.unknown():
        log.warning("%s: %s: not known here, left aside", folder / CONFIG, ", ".join(unknown))
    weights = to_ours(adapter.table(config), shapes_of(config, found, folder), renamed(adapter, config, found), folder)
    tokenizers = hugging_face_tokenizer(folder)
    name = next(iter(fields.texts("architectures")), adapter.name)
    return Imported(config, weights, tokenizers, _extra(folder, fields, config, tokenizers), name[:80])


def renamed(adapter: Adapter, config: ModelConfig, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under the names of the table, without what follows from others."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in found.items():
        for pattern, replacement in adapter.renames(config):
            name = re.sub(pattern, replacement, name)
        if any(re.fullmatch(pattern, name) for pattern in adapter.derived):
            continue
        if name in tensors and not tensors[name].equal(tensor):
            raise UserError(f"{name} stands twice in the file, with different numbers")
        tensors[name] = tensor
    return tensors


def adapter_of(fields: Fields) -> Adapter:
    """The adapter of the architecture that a config.json names."""
    kind = fields.text("model_type")
    for adapter in ADAPTERS:
        if kind in adapter.kinds:
            return adapter
    raise UserError(f"{fields.where}: model_type: {kind!r:.40} is not known here; known: {', '.join(KINDS)}")


def _tensors(folder: Path) -> dict[str, Tensor]:
    names = {path.name for path in folder.iterdir()}
    pickled = next((name for name in sorted(names) if name.endswith((".bin", ".pt", ".pth", ".ckpt"))), None)
    if not names & {WEIGHTS, INDEX} and pickled:
        raise UserError(f"{folder / pickled} is a pickle, which can run code; convert it to safetensors first")
    found: dict[str, Tensor] = {}
    for file in weight_files(folder, names):
        tensors = read_tensors(folder / file)
        if twice := found.keys() & tensors.keys():
            raise UserError(f"{folder / file}: {min(twice)} stands in two files")
        found |= tensors
    return _of_one_kind(found, folder)


def _of_one_kind(found: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Weights of several kinds of number become the widest of them, as a network needs one."""
    kinds = {tensor.dtype for tensor in found.values() if tensor.is_floating_point()}
    if unknown := kinds - KNOWN:
        raise UserError(f"{folder}: weights as {unknown.pop()} cannot be represented here")
    if len(kinds) < 2:
        return found
    widest = functools.reduce(torch.promote_types, kinds)
    log.warning("%s: weights of several kinds of number, read as %s", folder, str(widest).removeprefix("torch."))
    return {name: tensor.to(widest) if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def _extra(folder: Path, fields: Fields, config: ModelConfig, tokenizers: tuple[Any, ...]) -> dict[str, Any]:
    """What else a folder says that our verbs need."""
    extra: dict[str, Any] = {}
    labels = fields.data.get("id2label")
    if config.labels and isinstance(labels, dict):
        extra["labels"] = [str(labels.get(str(number), number))[:200] for number in range(config.labels)]
    if task := next((TASKS[name] for name in config.outputs if name in TASKS), None):
        extra["task"] = "regression" if task == "classification" and config.labels == 1 else task
    if config.family != "encoder":
        extra |= special_ids(folder, fields, config, tokenizers)
    return extra | read_pooling(folder)


def write(loaded: Loaded, draft: Path) -> None:
    """Our model as a folder of theirs, if its architecture is one of theirs; else what differs is named."""
    config, tensors = loaded.config, tensors_of(loaded.network)
    adapter = _nearest(config)
    theirs = adapter.theirs(config) | {"dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch.")}
    ids = hugging_face_files(loaded, draft)
    write_pooling(loaded, draft)
    if adapter is MARIAN and "heads.lm_head.proj.bias" not in tensors:
        tensors["heads.lm_head.proj.bias"] = tensors["encoder.embedding.tokens.weight"].new_zeros(config.target_vocab)
    if config.labels and loaded.extra.get("labels"):
        names = [str(name) for name in loaded.extra["labels"]]
        theirs |= {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    disk.write_json(draft / CONFIG, theirs | ids)
    save_weights(draft, to_theirs(adapter.table(config), tensors))


def _nearest(config: ModelConfig) -> Adapter:
    """The architecture of theirs that is ours; where none is, the difference to the nearest."""
    found = {
        adapter.name: (differences(adapter, config), adapter) for adapter in ADAPTERS if adapter.family == config.family
    }
    lines, adapter = min(found.values(), key=lambda each: len(each[0]))
    if lines:
        raise UserError(f"export: {adapter.name} is the nearest that Hugging Face has, but {'; '.join(lines)}")
    return adapter


def differences(adapter: Adapter, config: ModelConfig) -> list[str]:
    """What our config would come back as: every setting that it would lose."""
    free = FREE | (MARIANS if adapter is MARIAN else set()) | (set() if "lm" in config.outputs else WORDS)
    entries = {name: look_up(name, adapter.table(config)) for name in tensors_of(build(config, "meta"))}
    try:
        names = {entry.name for entry in entries.values() if entry is not None}
        back = adapter.ours(Fields(adapter.theirs(config), adapter.name), names)
    except UserError as error:
        return [str(error)]
    lines = [
        f"{key} is {_shown(value)} there, {_shown(getattr(config, key))} here"
        for key, value in back
        if key not in free and value != getattr(config, key)
    ]
    return lines or [f"it has no place for {name}" for name, entry in entries.items() if entry is None]


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
