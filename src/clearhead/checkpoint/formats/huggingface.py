"""Hugging Face import and export: config.json, safetensors in one file or sharded, tokenizer.json."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.checkpoint import disk
from clearhead.checkpoint.export_advice import setting, train_with
from clearhead.checkpoint.formats import packed_int4
from clearhead.checkpoint.formats.adapter import Adapter
from clearhead.checkpoint.formats.bart import BART, M2M100, MBART
from clearhead.checkpoint.formats.bert import BERT
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.distilbert import DISTILBERT
from clearhead.checkpoint.formats.gpt import GPT1, GPT2
from clearhead.checkpoint.formats.hf_tokenizer import read_hf_tokenizer, special_ids, write_hf_tokenizer
from clearhead.checkpoint.formats.imported_model import ImportedModel
from clearhead.checkpoint.formats.llama import LLAMA
from clearhead.checkpoint.formats.marian import MARIAN, check_positions, to_halves
from clearhead.checkpoint.formats.modernbert import MODERNBERT
from clearhead.checkpoint.formats.name_table import find_entry, from_foreign, to_foreign
from clearhead.checkpoint.formats.pegasus import PEGASUS, stored_positions
from clearhead.checkpoint.formats.phi3 import PHI3
from clearhead.checkpoint.formats.qwen import QWEN2, QWEN3
from clearhead.checkpoint.formats.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA
from clearhead.checkpoint.formats.sentence_transformers import read_pooling, write_pooling
from clearhead.checkpoint.formats.unsupported import refusal
from clearhead.checkpoint.model_folder import (
    CONFIG,
    FORMAT,
    INDEX,
    WEIGHTS,
    LoadedModel,
    meta_network,
    save_weights,
    weight_files,
)
from clearhead.checkpoint.tensors import named_tensors, read_tensors, to_one_dtype
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model import build

log = logging.getLogger("clearhead")
ADAPTERS = (
    *(BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, MODERNBERT),
    *(GPT2, GPT1, LLAMA, QWEN2, QWEN3, PHI3),
    *(MARIAN, PEGASUS, BART, MBART, M2M100),
)
SINUSOIDAL = (MARIAN, PEGASUS)
BIASED = (*SINUSOIDAL, BART, MBART)  # always have an output bias, which may be zero
MODEL_TYPES = [model_type for adapter in ADAPTERS for model_type in adapter.model_types]
PEFT_CONFIG = "adapter_config.json"  # of a LoRA or similar, which transformers would load
TASKS = {"classes": "classification", "tags": "tagging", "span": "answering"}
# Keys that do not change what a model computes.
IGNORED_KEYS = (
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "_name_or_path"),
    *("initializer_range", "tokenizer_class", "is_encoder_decoder", "_num_labels", "num_labels", "finetuning_task"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id", "sep_token_id"),
    *("_attn_implementation_autoset", "output_past", "task_specific_params", "gradient_checkpointing"),
)
TRAINING_ONLY = {"init", "dropout", "attention_dropout"}
SINUSOIDAL_IGNORED = {"vocab_size", "source_vocab_size", "target_vocab_size"}  # one size may be written as two
LM_ONLY = {"tie", "output_bias"}  # without meaning if there is no LM head


PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")  # file names


def pickle_refused(path: Path) -> str:
    """Why a pickle is not read."""
    return f"{path} is a pickle, which can run code when it is read; convert it to safetensors first"


def adapter_refused(folder: Path) -> str:
    """Why an adapter is not read."""
    return f"{folder / PEFT_CONFIG}: adapters are not supported; merge them into the model first"


def is_folder(source: Path) -> bool:
    """Whether this looks like a Hugging Face folder."""
    return (source / CONFIG).is_file()


def read(folder: Path) -> ImportedModel:
    """Read a model folder; features that we do not support are refused by name."""
    fields = Fields(disk.read_json(folder / CONFIG), folder / CONFIG)
    if fields.data.get("format") == FORMAT:
        raise UserError(f"{folder} is a Clearhead model folder already; use it directly")
    adapter = adapter_of(fields)
    if (folder / PEFT_CONFIG).is_file():
        raise UserError(adapter_refused(folder))
    if "quantization" in fields.data:
        raise UserError(
            f"{folder / CONFIG}: the weights are quantized by MLX; import the model they were made from, or dequantize "
            "them with `mlx_lm.convert --dequantize` first"
        )
    if (quantization := fields.group("quantization_config")) is not None:
        packed_int4.check_method(quantization, folder / CONFIG)
        if adapter in (GPT1, GPT2):
            raise UserError(f"{folder / CONFIG}: quantized weights of {adapter.name} are not supported")
    fields.require("custom code", "auto_map")
    fields.ignore(*IGNORED_KEYS)
    tensors = _read_tensors(folder)
    if quantization is not None:
        tensors = packed_int4.unpack(tensors, quantization, folder)
    config = adapter.from_hf(fields, tensors.keys())
    if adapter in SINUSOIDAL:
        check_positions(config, tensors, folder)
    if unknown := fields.unknown():
        log.warning("%s: %s: unknown settings, ignored", folder / CONFIG, ", ".join(unknown))
    network = meta_network(config, tensors, folder)
    weights = from_foreign(adapter.table(config), network, canonical_names(adapter, config, tensors), folder)
    tokenizers = read_hf_tokenizer(folder)
    name = next(iter(fields.strings("architectures")), adapter.name)
    return ImportedModel(config, weights, tokenizers, _extra(folder, fields, config, tokenizers), name[:80])


def canonical_names(adapter: Adapter, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return foreign tensors under the names of the table, without those that we compute."""
    by_name: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in adapter.renames(config):
            name = re.sub(pattern, replacement, name)
        if any(re.fullmatch(pattern, name) for pattern in adapter.computed):
            continue
        if name in by_name and not by_name[name].equal(tensor):
            raise UserError(f"{name} is duplicated in the file, with different values")
        by_name[name] = tensor
    return by_name


def adapter_of(fields: Fields) -> Adapter:
    """Return the adapter of a config.json's model_type."""
    model_type = fields.string("model_type")
    for adapter in ADAPTERS:
        if model_type in adapter.model_types:
            return adapter
    raise refusal(fields.where, "model_type", model_type, MODEL_TYPES)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    names = {path.name for path in folder.iterdir()}
    pickled = next((name for name in sorted(names) if name.endswith(PICKLES)), None)
    if not names & {WEIGHTS, INDEX} and pickled:
        raise UserError(pickle_refused(folder / pickled))
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder, names):
        shard = read_tensors(folder / file)
        if duplicates := tensors.keys() & shard.keys():
            raise UserError(f"{folder / file}: {min(duplicates)} is in two files")
        tensors |= shard
    return to_one_dtype(tensors, folder)


def _extra(folder: Path, fields: Fields, config: ModelConfig, tokenizers: tuple[Any, ...]) -> dict[str, Any]:
    """Return task, labels, special tokens and pooling for our config.json."""
    extra: dict[str, Any] = {}
    labels = fields.data.get("id2label")
    if config.labels and isinstance(labels, dict):
        extra["labels"] = [str(labels.get(str(number), number))[:200] for number in range(config.labels)]
    if task := next((TASKS[name] for name in config.outputs if name in TASKS), None):
        extra["task"] = "regression" if task == "classification" and config.labels == 1 else task
    if config.family != "encoder":
        extra |= special_ids(folder, fields, config, tokenizers)
    return extra | read_pooling(folder)


def write(loaded: LoadedModel, folder: Path) -> None:
    """Write a Hugging Face folder; if no architecture fits, raise an error with the differences to the nearest."""
    config, tensors = loaded.config, named_tensors(loaded.network)
    adapter = matching_adapter(config, str(loaded.extra.get("imported", "")))
    settings = adapter.to_hf(config) | {"dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch.")}
    ids = write_hf_tokenizer(loaded, folder)
    write_pooling(loaded, folder)
    if adapter in BIASED:
        bias = tensors["encoder.embedding.tokens.weight"].new_zeros(config.target_vocab)
        tensors = {"heads.lm_head.proj.bias": bias} | tensors
    if adapter in SINUSOIDAL:
        tensors = to_halves(config, tensors)
    if config.labels and loaded.extra.get("labels"):
        names = [str(name) for name in loaded.extra["labels"]]
        settings |= {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    disk.write_json(folder / CONFIG, ids | settings)  # RoBERTa's padding id is part of its architecture
    foreign = to_foreign(adapter.table(config), tensors)
    if adapter is PEGASUS:
        foreign |= stored_positions(config, foreign["model.shared.weight"].dtype)
    save_weights(folder, foreign)


def matching_adapter(config: ModelConfig, imported: str) -> Adapter:
    """Return the adapter of the same architecture, or name the differences to the nearest.

    Of several that fit, the one that the model was imported as is returned: a Phi-3 is also a Llama.
    """
    adapters = sorted(ADAPTERS, key=lambda adapter: not adapter.has_class(imported))
    candidates = [(differences(adapter, config), adapter) for adapter in adapters if adapter.family == config.family]
    lines, adapter = min(candidates, key=lambda candidate: len(candidate[0]))
    if lines:
        check_outputs(config, "hf")
        what = "; ".join(line for line, _ in lines)
        raise UserError(
            f"export: the closest Hugging Face architecture is {adapter.name}, but {what}"
            + train_with([change for _, change in lines])
        )
    return adapter


def check_outputs(config: ModelConfig, target: str) -> None:
    """Refuse a decoder with another head than that of a language model: its advice would be another task."""
    if config.family == "decoder" and config.outputs != ("lm",):
        outputs = ", ".join(config.outputs) or "none"
        raise UserError(
            f"export: a decoder with outputs: {outputs} cannot be exported to {target}; only one with lm can"
        )


def differences(adapter: Adapter, config: ModelConfig) -> list[tuple[str, str]]:
    """Return what would change if the exported config were imported again, each with the setting that prevents it."""
    ignored = (
        TRAINING_ONLY
        | (SINUSOIDAL_IGNORED if adapter in SINUSOIDAL else set())
        | ({"sinusoid"} if adapter in SINUSOIDAL and config.sinusoid == "interleaved" else set())  # see to_halves
        | ({"output_bias"} if adapter in BIASED else set())
        | (set() if "lm" in config.outputs else LM_ONLY)
    )
    entries = {name: find_entry(name, adapter.table(config)) for name in named_tensors(build(config, "meta"))}
    try:
        names = {entry.name for entry in entries.values() if entry is not None}
        back = adapter.from_hf(Fields(adapter.to_hf(config), adapter.name), names)
    except UserError as error:
        return [(str(error), "")]
    lines = [
        (f"{key} is {_shown(getattr(config, key))} in this model, but {_shown(value)} there", setting(key, value))
        for key, value in back
        if key not in ignored and value != getattr(config, key)
    ]
    return lines or [(f"it does not have {name}", "") for name, entry in entries.items() if entry is None]


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
