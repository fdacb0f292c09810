"""GGUF export: Llama, Qwen2 and Qwen3 models for llama.cpp in F16 or Q8_0, with tokenizer and chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clearhead.checkpoint.export_advice import train_with
from clearhead.checkpoint.formats.bpe import (
    LLAMA3_PRETOKENIZER,
    NORMALIZERS,
    PRETOKENIZERS,
    pretokenizer_json,
    without_trimming,
)
from clearhead.checkpoint.formats.gguf import ADDED, CONTROL, NORMAL, ROPE_SCALING_KEY, UNKNOWN
from clearhead.checkpoint.formats.gguf_architectures import architecture_of, table
from clearhead.checkpoint.formats.gpt import GPT1, GPT2
from clearhead.checkpoint.formats.hf_tokenizer import bos_ids, eos_ids, vocabulary_list
from clearhead.checkpoint.formats.huggingface import check_outputs, differences
from clearhead.checkpoint.formats.llama import LLAMA
from clearhead.checkpoint.formats.name_table import to_foreign
from clearhead.checkpoint.formats.optional_import import import_optional
from clearhead.checkpoint.formats.qwen import QWEN2, QWEN3
from clearhead.checkpoint.model_folder import LoadedModel
from clearhead.checkpoint.tensors import named_tensors
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model.positions import rope_frequencies
from clearhead.text import Tokenizer

UNUSED, BYTE = 5, 6  # token types
FILE = "model.gguf"
SPACE_NORMALIZERS = [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
]


def write_f16(loaded: LoadedModel, folder: Path) -> None:
    """Write model.gguf with matrices in F16."""
    _write(loaded, folder, "F16")


def write_q8_0(loaded: LoadedModel, folder: Path) -> None:
    """Write model.gguf with matrices in Q8_0, or F16 where a row is not a multiple of its block of 32."""
    _write(loaded, folder, "Q8_0")


def _write(loaded: LoadedModel, folder: Path, kind: str) -> None:
    config = loaded.config
    _check(config)
    if len(loaded.tokenizers) != 1:
        raise UserError("export: GGUF needs one tokenizer, which this model does not have")
    gguf = import_optional("gguf")
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(str(folder / FILE), architecture)
    _add_settings(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "Q8_0" else gguf.LlamaFileType.MOSTLY_F16)
    _add_tokenizer(writer, loaded)
    tensors = to_foreign(table(config, architecture), named_tensors(loaded.network))
    if config.rope_scaling is not None:
        unscaled = config.model_copy(update={"rope_scaling": None})
        cpu = torch.device("cpu")
        tensors["rope_freqs.weight"] = rope_frequencies(unscaled, cpu) / rope_frequencies(config, cpu)
    for name, tensor in tensors.items():
        _add_tensor(writer, name, tensor.float().contiguous().numpy(), kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _check(config: ModelConfig) -> None:
    check_outputs(config, "GGUF")
    gpts = (GPT2, GPT1) if config.family == "decoder" else ()
    if gpt := next((each for each in gpts if not differences(each, config)), None):
        raise UserError(f"export: {gpt.name} has no GGUF export here; export it to hf or ctranslate2")
    architecture = architecture_of(config)
    adapter = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}[architecture]
    problems = [(f"family is {config.family}", "")] if config.family != "decoder" else differences(adapter, config)
    if config.rope_scaling is not None and architecture != "llama":
        problems.append((f"rope_scaling is set, which llama.cpp does not read for {adapter.name}", ""))
    if config.attention != ("full",):
        window = "attention has a window, which llama.cpp ignores for this architecture"
        problems.append((window, "model.attention=full"))
    if problems:
        what = "; ".join(line for line, _ in problems)
        raise UserError(
            f"export: GGUF is supported for models like Llama, Qwen2 and Qwen3 only, but {what}"
            + train_with([change for _, change in problems])
        )


def _add_settings(writer: Any, config: ModelConfig) -> None:
    writer.add_block_count(config.decoder_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.dim)
    writer.add_feed_forward_length(config.ff_dim)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.target_vocab)
    for key, value in config.rope_scaling or ():
        writer.add_float32(f"{ROPE_SCALING_KEY}.{key}", value)


def _add_tensor(writer: Any, name: str, array: "np.ndarray[Any, Any]", kind: str) -> None:
    types = import_optional("gguf").GGMLQuantizationType
    if array.ndim == 1:  # norms: few numbers, and sensitive to rounding
        writer.add_tensor(name, array)
        return
    if kind == "Q8_0" and array.shape[-1] % 32 == 0:
        writer.add_tensor(name, import_optional("gguf.quants").quantize(array, types.Q8_0), raw_dtype=types.Q8_0)
        return
    if np.abs(array).max(initial=0) > np.finfo(np.float16).max:
        raise UserError(f"export: {name} has numbers outside F16's range")
    writer.add_tensor(name, array.astype(np.float16))


def _add_tokenizer(writer: Any, loaded: LoadedModel) -> None:
    tokenizer, size = loaded.tokenizers[0], loaded.config.target_vocab
    settings = json.loads(tokenizer.engine.to_str())
    model = settings["model"]
    tokens, types = vocabulary_list(tokenizer, size), [UNUSED] * size
    for number in tokenizer.vocabulary.values():
        types[number] = NORMAL
    for added in settings["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else ADDED
    if model["type"] != "BPE":
        raise UserError(f"export: GGUF does not support a {model['type']} tokenizer; train one of kind byte-bpe")
    if model.get("byte_fallback"):
        _add_sentencepiece_bpe(writer, tokenizer, settings, tokens, types)
    else:
        _add_byte_level_bpe(writer, settings, tokens)
    writer.add_token_types(types)
    begin, end = bos_ids(loaded), eos_ids(loaded)
    if len(begin) > 1 or not 1 <= len(end) <= 3:  # without an end token, llama.cpp would use another token
        raise UserError("export: GGUF supports at most one begin token and one to three end tokens")
    writer.add_add_bos_token(bool(begin))
    if begin:
        writer.add_bos_token_id(begin[0])
    add_end = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, token_id in zip(add_end, end, strict=False):
        add(token_id)
    if "pad" in tokenizer.roles:
        writer.add_pad_token_id(tokenizer.roles["pad"])
    if template := loaded.extra.get("chat_template"):
        writer.add_chat_template(template)


def _add_byte_level_bpe(writer: Any, settings: dict[str, Any], tokens: Sequence[str]) -> None:
    """Add byte-level BPE with merges."""
    model = settings["model"]
    affixed = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    splitting = without_trimming(settings["pre_tokenizer"]), bool(model.get("ignore_merges"))
    name = next((name for name in PRETOKENIZERS if splitting == _splitting(name) and not affixed), None)
    if name is None or settings["normalizer"] != NORMALIZERS.get(name):
        part = "pre-tokenizer" if name is None else "normalizer"
        raise UserError(f"export: GGUF does not support this tokenizer's {part}; train one of kind byte-bpe")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])


def _splitting(name: str) -> tuple[Any, bool]:
    """Return the pre-tokenizer of a GGUF name, and whether a word that is a token is not split."""
    return without_trimming(pretokenizer_json(name)), name == LLAMA3_PRETOKENIZER


def _add_sentencepiece_bpe(
    writer: Any, tokenizer: Tokenizer, settings: dict[str, Any], tokens: Sequence[str], types: list[int]
) -> None:
    """Add SentencePiece's BPE: the earlier a merge, the higher its score."""
    model, normalizer = settings["model"], settings["normalizer"] or {}
    if settings["pre_tokenizer"] is not None or normalizer.get("normalizers", [normalizer]) not in (
        SPACE_NORMALIZERS,
        SPACE_NORMALIZERS[1:],
    ):
        raise UserError("export: GGUF does not support this tokenizer's pre-tokenizer or normalizer")
    scores = [-float(len(model["merges"]) + 1)] * len(tokens)
    for rank, (left, right) in reversed([*enumerate(model["merges"])]):
        scores[tokenizer.vocabulary[left + right]] = -float(rank)
    for number, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x"):
            types[number] = BYTE
    if model.get("unk_token") in tokenizer.vocabulary:
        types[tokenizer.vocabulary[model["unk_token"]]] = UNKNOWN
        writer.add_unk_token_id(tokenizer.vocabulary[model["unk_token"]])
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(normalizer.get("normalizers") == SPACE_NORMALIZERS)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
