"""GGUF import: Llama, Qwen2, Qwen3 and Phi-3 of llama.cpp, quantized or not.

The header is read here, with bounds checks; quantized blocks in `gguf_quants.py`.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.checkpoint.formats.binary_reader import BinaryReader, open_binary
from clearhead.checkpoint.formats.bpe import LLAMA3_PRETOKENIZER, byte_level_bpe, sentencepiece_bpe, wordpiece
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.gguf_architectures import ARCHITECTURES, table
from clearhead.checkpoint.formats.gguf_quants import BLOCK_TYPES, dequantize, quantized
from clearhead.checkpoint.formats.imported_model import ImportedModel
from clearhead.checkpoint.formats.name_table import from_foreign
from clearhead.checkpoint.formats.unsupported import refusal
from clearhead.checkpoint.model_folder import meta_network
from clearhead.config import ModelConfig, RopeScaling
from clearhead.errors import UserError
from clearhead.files import open_regular
from clearhead.model.positions import rope_frequencies, scale_rope_frequencies
from clearhead.ops.linear.quantized_tensor import QuantizedTensor
from clearhead.text import Tokenizer

log = logging.getLogger("clearhead")
MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
NORMAL, UNKNOWN, CONTROL, ADDED = 1, 2, 3, 4  # token types
EOS_TOKENS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "</s>",
)  # llama.cpp stops at any of them
ROPE_SCALING_KEY = "clearhead.rope_scaling"  # ours; llama.cpp reads the tensor rope_freqs
LLAMA3_SCALING: dict[str, float] = {
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_positions": 8192,
}


@dataclass(frozen=True)
class TensorInfo:
    """Type, shape and position of a tensor in the file."""

    kind: int  # ggml_type
    shape: tuple[int, ...]
    offset: int
    size: int


def is_gguf(path: Path) -> bool:
    """Whether a file begins with GGUF's magic number."""
    with open_regular(path) as file:
        return file.read(4) == MAGIC


def read(path: Path) -> ImportedModel:
    """Read a model with its tokenizer; weights in Q8_0, Q4_0, Q4_1 or Q4_K stay quantized."""
    with open_binary(path) as reader:
        settings, infos = read_header(reader)
        fields = Fields(settings, path)
        if (architecture := fields.string("general.architecture")) not in ARCHITECTURES:
            raise refusal(path, "general.architecture", architecture, ARCHITECTURES)
        tensors = {name: _tensor(reader, info) for name, info in infos.items()}
    factors = tensors.pop("rope_freqs.weight", None)
    config = _config(fields, tensors, factors)
    if unknown := [key for key in fields.unknown() if key.startswith(f"{architecture}.")]:
        log.warning("%s: %s: unknown settings, ignored", path, ", ".join(unknown))
    weights = from_foreign(table(config, architecture), meta_network(config, tensors, path), tensors, path)
    tokenizer = _tokenizer(fields, config.target_vocab)
    license = str(settings.get("general.license", ""))[:200]
    kind = f"GGUF, {ARCHITECTURES[architecture].name}"
    return ImportedModel(config, weights, (tokenizer,), _extra(fields, tokenizer), kind, license)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read only the tokenizer of a file, which may have no tensors."""
    with open_binary(path) as reader:
        fields = Fields(read_header(reader)[0], path)
    tokens = fields.data.get("tokenizer.ggml.tokens")
    return _tokenizer(fields, len(tokens) if isinstance(tokens, list) else 0)


def read_header(reader: BinaryReader) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Return settings and tensor infos, their offsets and sizes checked against the file."""
    if reader.size < 4 or reader.data[:4] != MAGIC:
        raise UserError(f"{reader.path} is not a GGUF file")
    reader.position = 4
    version = reader.number("I")
    if version not in VERSIONS:
        raise UserError(
            f"{reader.path}: GGUF version {version} is not supported; {' and '.join(map(str, VERSIONS))} are"
        )
    count, keys = reader.numbers("QQ")
    reader.check_count(keys, 13, "settings")
    settings: dict[str, Any] = {}
    for _ in range(keys):
        key = reader.text(reader.number("Q"))
        settings[key] = _read_value(reader, reader.number("I"), key)
    reader.check_count(count, 24, "tensors")
    infos = [_read_info(reader) for _ in range(count)]
    alignment = settings.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise reader.error(f"general.alignment: {alignment!r:.20}")
    start = -(-reader.position // alignment) * alignment
    end, tensors = start, dict[str, TensorInfo]()
    for name, info in sorted(infos, key=lambda each: each[1].offset):
        offset = start + info.offset
        if offset < end or info.offset % alignment or offset + info.size > reader.size:
            raise reader.error(f"{name:.60} is outside the file, or overlaps another tensor")
        if name in tensors:
            raise reader.error(f"{name:.60} is duplicated")
        end = offset + info.size
        tensors[name] = TensorInfo(info.kind, info.shape, offset, info.size)
    return settings, tensors


def _read_value(reader: BinaryReader, kind: int, key: str) -> Any:
    if kind in SCALARS:
        value = reader.number(SCALARS[kind])
        return _shortest_decimal(value) if kind == 6 else value
    if kind == STRING:
        return reader.text(reader.number("Q"))
    if kind != ARRAY:
        raise reader.error(f"{key:.60}: a value of unknown type {kind}")
    inner, count = reader.numbers("IQ")
    if inner in SCALARS:
        reader.check_count(count, 1, f"values of {key:.60}")
        return reader.array(f"<{SCALARS[inner]}" if inner != 7 else "?", count)  # as a list, 40 times as large
    if inner != STRING:
        raise reader.error(f"{key:.60}: an array of unknown type {inner}")
    reader.check_count(count, 8, f"values of {key:.60}")
    return [reader.text(reader.number("Q")) for _ in range(count)]


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal of an fp32 number: 1e-5 instead of 9.999999747e-06."""
    return float(str(np.float32(value)))


def _read_info(reader: BinaryReader) -> tuple[str, TensorInfo]:
    name = reader.text(reader.number("Q"))
    dimensions = reader.number("I")
    if dimensions > 4:
        raise reader.error(f"{name:.60} has {dimensions} dimensions")
    shape = tuple(reversed(reader.numbers(f"{dimensions}Q")))  # the innermost is first in the file
    kind, offset = reader.numbers("IQ")
    if kind not in BLOCK_TYPES:
        supported = ", ".join(each.name for each in BLOCK_TYPES.values())
        raise UserError(
            f"{reader.path}: {name:.60}: weights of type {kind} are not supported; use a file of {supported}"
        )
    block = BLOCK_TYPES[kind]
    if not shape or not all(shape) or shape[-1] % block.numbers:
        raise reader.error(f"{name:.60} of shape {shape} is empty, or not a multiple of the block size")
    return name, TensorInfo(kind, shape, offset, math.prod(shape) // block.numbers * block.bytes)


def _tensor(reader: BinaryReader, info: TensorInfo) -> Tensor:
    """Read a tensor: a matrix in int8 or int4 if our kernels have its integers, any other in fp32."""
    block = BLOCK_TYPES[info.kind]
    raw = np.frombuffer(reader.data, np.uint8, info.size, info.offset).reshape(-1, block.bytes)
    if len(info.shape) == 2 and (parts := quantized(raw, info.kind)) is not None:
        # Copies, as the file is not kept open.
        return QuantizedTensor(*(torch.tensor(part).view(info.shape[0], -1) for part in parts if part is not None))
    return torch.from_numpy(dequantize(raw, info.kind).reshape(info.shape))


def _config(fields: Fields, tensors: Mapping[str, Tensor], factors: Tensor | None) -> ModelConfig:
    name = fields.string("general.architecture")
    fields.require("mixture of experts", f"{name}.expert_count", 0)
    fields.require("non-causal attention", f"{name}.attention.causal", True)
    fields.require("this type of rotary scaling", f"{name}.rope.scaling.type", "none")
    for key in ("factor", "attn_factor"):  # of llama.cpp's default type, linear
        fields.require("this type of rotary scaling", f"{name}.rope.scaling.{key}", 1.0, 0.0)
    fields.require("this type of rotary scaling", f"{name}.rope.scale_linear", 1.0, 0.0)
    for key in ("attention.scale", "attention.clamp_kqv", "embedding_scale", "residual_scale", "logit_scale"):
        fields.require("this scale or limit", f"{name}.{key}", 0.0)
    tokens = fields.data.get("tokenizer.ggml.tokens")
    heads, dim = fields.integer(f"{name}.attention.head_count"), fields.integer(f"{name}.embedding_length")
    head_dim = fields.integer(f"{name}.attention.key_length", dim // max(1, heads))
    fields.require("a partial rotary embedding", f"{name}.rope.dimension_count", head_dim)
    fields.require("another dim for values than for keys", f"{name}.attention.value_length", head_dim)
    settings: dict[str, Any] = {
        **ARCHITECTURES[name].settings,
        "decoder_layers": fields.integer(f"{name}.block_count"),
        "dim": dim,
        "heads": heads,
        "kv_heads": fields.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "ff_dim": fields.integer(f"{name}.feed_forward_length"),
        "norm_eps": fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "max_positions": fields.integer(f"{name}.context_length"),
        "rope_theta": fields.number(f"{name}.rope.freq_base", 10_000.0),
        "vocab_size": fields.integer(f"{name}.vocab_size", len(tokens) if isinstance(tokens, list) else 0),
        "tie": "none" if "output.weight" in tensors else "output",
    }
    fields.ignore(f"{name}.rope.scaling.original_context_length")
    if fields.has(f"{name}.attention.sliding_window"):
        settings |= {"attention": "window", "window": fields.integer(f"{name}.attention.sliding_window")}
    config = ModelConfig.build(settings, where=str(fields.where))
    return config if factors is None else _with_rope_scaling(config, factors, fields)


def _with_rope_scaling(config: ModelConfig, factors: Tensor, fields: Fields) -> ModelConfig:
    """Return the config with Llama 3's rope scaling, if that gives the frequency factors of the file."""
    settings = {"factor": float(factors.max()), **LLAMA3_SCALING}  # defaults for files that we did not write
    settings = {key: fields.number(f"{ROPE_SCALING_KEY}.{key}", value) for key, value in settings.items()}
    integers = {key: int(value) for key, value in settings.items() if value.is_integer()}
    scaling = RopeScaling.build(settings | integers, where=f"{fields.where}: rope_freqs")
    frequencies = rope_frequencies(config, torch.device("cpu"))
    if factors.shape != frequencies.shape or not torch.allclose(
        frequencies / scale_rope_frequencies(frequencies, scaling), factors, rtol=1e-3
    ):
        raise UserError(f"{fields.where}: rope_freqs: scaling other than Llama 3's is not supported")
    return config.model_copy(update={"rope_scaling": scaling})


def _tokenizer(fields: Fields, size: int) -> Tokenizer:
    tokens, types = _list(fields, "tokens", str), _list(fields, "token_type", int)
    types = types or [NORMAL] * len(tokens)
    if not 0 < len(tokens) <= size:
        raise UserError(f"{fields.where}: tokenizer.ggml.tokens: {len(tokens):,} tokens, but a vocabulary of {size:,}")
    if len(types) != len(tokens):
        raise UserError(f"{fields.where}: tokenizer.ggml.tokens and token_type differ in length")
    control = [number for number, each in enumerate(types) if each in (CONTROL, UNKNOWN)]
    added = [number for number, each in enumerate(types) if each == ADDED]
    match fields.string("tokenizer.ggml.model"):
        case "gpt2":
            pretokenizer = fields.string("tokenizer.ggml.pre", "default")
            return byte_level_bpe(tokens, _list(fields, "merges", str), pretokenizer, control, added, fields.where)
        case "llama":
            scores = _list(fields, "scores", float)
            if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
                raise UserError(f"{fields.where}: tokenizer.ggml.scores must have a finite number for each token")
            unknown = fields.integer("tokenizer.ggml.unknown_token_id", 0)
            if not 0 <= unknown < len(tokens):
                raise UserError(f"{fields.where}: tokenizer.ggml.unknown_token_id: {unknown} is not in the vocabulary")
            prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
            return sentencepiece_bpe(tokens, scores, unknown, control, added, prefix, fields.where)
        case "bert":
            return wordpiece(tokens, control, fields.where)
        case other:
            raise UserError(f"{fields.where}: tokenizer.ggml.model: {other!r:.40} is not supported")


def _list(fields: Fields, key: str, kind: type) -> list[Any]:
    values = fields.data.get(f"tokenizer.ggml.{key}", [])
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(values, list) or not all(type(each) is kind for each in values):
        raise UserError(f"{fields.where}: tokenizer.ggml.{key} is not a list of {kind.__name__}")
    return values


def _extra(fields: Fields, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return begin and end tokens, with llama.cpp's defaults, and the chat template."""
    size, get = len(tokenizer), fields.data.get
    ids = {role: fields.integer(f"tokenizer.ggml.{role}_token_id", -1) for role in ("bos", "eos", "eot", "eom")}
    default = get("tokenizer.ggml.model") == "llama" or get("tokenizer.ggml.pre") == LLAMA3_PRETOKENIZER
    add_bos = fields.flag("tokenizer.ggml.add_bos_token", default)
    eos_ids = [ids[role] for role in ("eos", "eot", "eom")] + [
        tokenizer.vocabulary.get(token, -1) for token in EOS_TOKENS
    ]
    extra: dict[str, Any] = {
        "begin": [ids["bos"]] if add_bos and 0 <= ids["bos"] < size else [],
        "eos_ids": list(dict.fromkeys(each for each in eos_ids if 0 <= each < size)),
    }
    if fields.has("tokenizer.chat_template"):
        extra["chat_template"] = fields.string("tokenizer.chat_template")
    return {key: value for key, value in extra.items() if value or key == "begin"}
