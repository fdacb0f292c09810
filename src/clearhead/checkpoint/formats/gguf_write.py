"""GGUF out: Llama-type models for llama.cpp, matrices as F16 or Q8_0, with their tokenizer and chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clearhead.checkpoint.folder import Loaded
from clearhead.checkpoint.formats.extras import library
from clearhead.checkpoint.formats.gguf import ADDED, CONTROL, NORMAL, RULE, UNKNOWN, table
from clearhead.checkpoint.formats.huggingface import differences
from clearhead.checkpoint.formats.llama import LLAMA
from clearhead.checkpoint.formats.tables import to_theirs
from clearhead.checkpoint.formats.tokens import begin_ids, end_ids, every_token
from clearhead.checkpoint.formats.vocabularies import WHOLE, WORDS, cut_of
from clearhead.checkpoint.tensors import tensors_of
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model.positions import rope_frequencies
from clearhead.text import Tokenizer

UNUSED, BYTE = 5, 6  # kinds of token
FILE = "model.gguf"
SPACES = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]


def write_f16(loaded: Loaded, draft: Path) -> None:
    """Matrices as F16."""
    _write(loaded, draft, "F16")


def write_q8_0(loaded: Loaded, draft: Path) -> None:
    """Matrices as Q8_0, blocks of 32 numbers with one scale; one whose rows are no whole blocks as F16."""
    _write(loaded, draft, "Q8_0")


def _write(loaded: Loaded, draft: Path, kind: str) -> None:
    config = loaded.config
    _check(config)
    if len(loaded.tokenizers) != 1:
        raise UserError("export: GGUF needs a model with its tokenizer")
    gguf = library("gguf")
    writer = gguf.GGUFWriter(str(draft / FILE), "llama")
    _settings(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "Q8_0" else gguf.LlamaFileType.MOSTLY_F16)
    _tokenizer(writer, loaded)
    tensors = to_theirs(table(config), tensors_of(loaded.network))
    if config.rope_scaling is not None:
        plain = config.model_copy(update={"rope_scaling": None})
        cpu = torch.device("cpu")
        tensors["rope_freqs.weight"] = rope_frequencies(plain, cpu) / rope_frequencies(config, cpu)
    for name, tensor in tensors.items():
        _tensor(writer, name, tensor.float().contiguous().numpy(), kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _check(config: ModelConfig) -> None:
    lines = differences(LLAMA, config) if config.family == "decoder" else [f"family is {config.family}"]
    lines += [] if config.attention == ("full",) else ["attention has a window, which llama.cpp does not read there"]
    if lines:
        raise UserError(f"export: GGUF holds models of Llama's kind here, but {'; '.join(lines)}")


def _settings(writer: Any, config: ModelConfig) -> None:
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
        writer.add_float32(f"{RULE}.{key}", value)


def _tensor(writer: Any, name: str, array: "np.ndarray[Any, Any]", kind: str) -> None:
    types = library("gguf").GGMLQuantizationType
    if array.ndim == 1:  # norms are few and matter much
        writer.add_tensor(name, array)
        return
    if kind == "Q8_0" and array.shape[-1] % 32 == 0:
        writer.add_tensor(name, library("gguf.quants").quantize(array, types.Q8_0), raw_dtype=types.Q8_0)
        return
    if np.abs(array).max(initial=0) > np.finfo(np.float16).max:
        raise UserError(f"export: {name} holds numbers beyond F16's range")
    writer.add_tensor(name, array.astype(np.float16))


def _tokenizer(writer: Any, loaded: Loaded) -> None:
    tokenizer, size = loaded.tokenizers[0], loaded.config.target_vocab
    written = json.loads(tokenizer.engine.to_str())
    model = written["model"]
    tokens, kinds = every_token(tokenizer, size), [UNUSED] * size
    for number in tokenizer.vocabulary.values():
        kinds[number] = NORMAL
    for added in written["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else ADDED
    if model["type"] != "BPE":
        raise UserError(f"export: GGUF has no place for a tokenizer of kind {model['type']}; train one as byte-bpe")
    if model.get("byte_fallback"):
        _pieces(writer, tokenizer, written, tokens, kinds)
    else:
        _bytes(writer, written, tokens)
    writer.add_token_types(kinds)
    begins, ends = begin_ids(loaded), end_ids(loaded)
    if len(begins) > 1 or not 1 <= len(ends) <= 3:  # without an end, llama.cpp would take a word for it
        raise UserError("export: GGUF needs one token at most that begins a text, and one to three that end it")
    writer.add_add_bos_token(bool(begins))
    if begins:
        writer.add_bos_token_id(begins[0])
    for add, end in zip(
        (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), ends, strict=False
    ):
        add(end)
    if "pad" in tokenizer.roles:
        writer.add_pad_token_id(tokenizer.roles["pad"])
    if template := loaded.extra.get("chat_template"):
        writer.add_chat_template(template)


def _bytes(writer: Any, written: dict[str, Any], tokens: Sequence[str]) -> None:
    """Byte-level BPE with merges."""
    model = written["model"]
    marked = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    way = written["pre_tokenizer"], bool(model.get("ignore_merges"))
    name = next((name for name in WORDS if way == (cut_of(name), name == WHOLE) and not marked), None)
    if name is None or written["normalizer"] is not None:
        what = "way to cut words" if name is None else "normalizer (lower-casing or the like)"
        raise UserError(f"export: GGUF has no place for this tokenizer's {what}; train one as byte-bpe")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])


def _pieces(
    writer: Any, tokenizer: Tokenizer, written: dict[str, Any], tokens: Sequence[str], kinds: list[int]
) -> None:
    """SentencePiece's BPE: the earlier a piece is made, the better its score."""
    model, spaces = written["model"], written["normalizer"] or {}
    if written["pre_tokenizer"] is not None or spaces.get("normalizers", [spaces]) not in (SPACES, SPACES[1:]):
        raise UserError("export: GGUF has no place for this tokenizer's way to cut words or write spaces")
    scores = [-float(len(model["merges"]) + 1)] * len(tokens)
    for rank, (left, right) in reversed([*enumerate(model["merges"])]):
        scores[tokenizer.vocabulary[left + right]] = -float(rank)
    for number, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x"):
            kinds[number] = BYTE
    if model.get("unk_token") in tokenizer.vocabulary:
        kinds[tokenizer.vocabulary[model["unk_token"]]] = UNKNOWN
        writer.add_unk_token_id(tokenizer.vocabulary[model["unk_token"]])
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(spaces.get("normalizers") == SPACES)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
