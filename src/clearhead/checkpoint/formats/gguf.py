"""GGUF, the files of llama.cpp: Llama-type models, in (quantized or not) and out (F16, Q8_0).

The header is read here, with limits; what the quantized blocks mean is the `gguf` library's knowledge.
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

from clearhead.checkpoint.formats.binary import Reader, opened
from clearhead.checkpoint.formats.extras import library
from clearhead.checkpoint.formats.fields import Fields
from clearhead.checkpoint.formats.imported import Imported
from clearhead.checkpoint.formats.llama import KIND
from clearhead.checkpoint.formats.tables import Entry, Table, interleaved, shapes_of, to_ours, under
from clearhead.checkpoint.formats.vocabularies import WHOLE, bytes_with_merges, pieces_with_scores
from clearhead.config import ModelConfig, RopeScaling
from clearhead.errors import UserError
from clearhead.model.positions import rope_frequencies, scale_rope_frequencies
from clearhead.text import Tokenizer

log = logging.getLogger("clearhead")
MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
NORMAL, UNKNOWN, CONTROL, ADDED = 1, 2, 3, 4  # kinds of token
ENDS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "</s>")  # llama.cpp ends at each
RULE = "clearhead.rope_scaling"  # of no meaning to others, who read rope_freqs
LLAMA3: dict[str, float] = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_positions": 8192}


def table(config: ModelConfig) -> Table:
    """llama.cpp keeps the two numbers that are turned together side by side."""
    layer: Table = {
        "attention_norm.weight": "attn_norm.weight",
        "attention.query.weight": Entry("attn_q.weight", interleaved(config.heads)),
        "attention.key.weight": Entry("attn_k.weight", interleaved(config.kv_heads)),
        "attention.value.weight": "attn_v.weight",
        "attention.output.weight": "attn_output.weight",
        "feed_forward_norm.weight": "ffn_norm.weight",
        "feed_forward.gate.weight": "ffn_gate.weight",
        "feed_forward.up.weight": "ffn_up.weight",
        "feed_forward.down.weight": "ffn_down.weight",
    }
    return {
        "decoder.embedding.tokens.weight": "token_embd.weight",
        **under("decoder.layers.*", "blk.*", layer),
        "decoder.norm.weight": "output_norm.weight",
        "heads.lm_head.proj.weight": "output.weight",
    }


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in the file, and as what."""

    kind: int  # ggml's number of the type
    shape: tuple[int, ...]
    offset: int
    size: int


def is_file(path: Path) -> bool:
    """Whether a file begins as GGUF does."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read(path: Path) -> Imported:
    """A Llama-type model with its tokenizer, all weights as fp32."""
    with opened(path) as reader:
        settings, tensors = header(reader)
        fields = Fields(settings, path)
        if (kind := fields.text("general.architecture")) != "llama":
            raise UserError(f"{path}: general.architecture: {kind!r:.40} cannot be represented here; llama can")
        found = {name: _dequantized(reader, name, stored) for name, stored in tensors.items()}
    factors = found.pop("rope_freqs.weight", None)
    config = _config(fields, found, factors)
    if unknown := [key for key in fields.unknown() if key.startswith("llama.")]:
        log.warning("%s: %s: not known here, left aside", path, ", ".join(unknown))
    weights = to_ours(table(config), shapes_of(config, found, path), found, path)
    tokenizer = _tokenizer(fields, config.target_vocab)
    license = str(settings.get("general.license", ""))[:200]
    return Imported(config, weights, (tokenizer,), _extra(fields, tokenizer), "GGUF, Llama", license)


def header(reader: Reader) -> tuple[dict[str, Any], dict[str, Stored]]:
    """The settings, and where each tensor lies; offsets and sizes are checked against the file."""
    sizes = library("gguf").GGML_QUANT_SIZES
    if reader.size < 4 or reader.data[:4] != MAGIC:
        raise UserError(f"{reader.path} is no GGUF file")
    reader.at = 4
    version = reader.number("I")
    if version not in VERSIONS:
        raise UserError(f"{reader.path}: GGUF version {version}, but {' and '.join(map(str, VERSIONS))} are read")
    count, keys = reader.numbers("QQ")
    reader.room_for(keys, 13, "settings")
    settings: dict[str, Any] = {}
    for _ in range(keys):
        key = reader.text(reader.number("Q"))
        settings[key] = _value(reader, reader.number("I"), key)
    reader.room_for(count, 24, "tensors")
    infos = [_info(reader, sizes) for _ in range(count)]
    alignment = settings.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise reader.wrong(f"general.alignment: {alignment!r:.20}")
    start = -(-reader.at // alignment) * alignment
    end, tensors = start, dict[str, Stored]()
    for name, stored in sorted(infos, key=lambda info: info[1].offset):
        place = start + stored.offset
        if place < end or stored.offset % alignment or place + stored.size > reader.size:
            raise reader.wrong(f"{name:.60} lies outside the file, or where another tensor is")
        if name in tensors:
            raise reader.wrong(f"{name:.60} stands twice")
        end = place + stored.size
        tensors[name] = Stored(stored.kind, stored.shape, place, stored.size)
    return settings, tensors


def _value(reader: Reader, kind: int, key: str) -> Any:
    if kind in SCALARS:
        found = reader.number(SCALARS[kind])
        return _shortest(found) if kind == 6 else found
    if kind == TEXT:
        return reader.text(reader.number("Q"))
    if kind != ARRAY:
        raise reader.wrong(f"{key:.60}: a value of unknown kind {kind}")
    inner, count = reader.numbers("IQ")
    if inner in SCALARS:
        reader.room_for(count, 1, f"values of {key:.60}")
        return reader.array(f"<{SCALARS[inner]}" if inner != 7 else "?", count).tolist()
    if inner != TEXT:
        raise reader.wrong(f"{key:.60}: a list of unknown kind {inner}")
    reader.room_for(count, 8, f"values of {key:.60}")
    return [reader.text(reader.number("Q")) for _ in range(count)]


def _shortest(value: float) -> float:
    """The number that was meant: 1e-5, where fp32 holds 9.999999747e-06."""
    return float(str(np.float32(value)))


def _info(reader: Reader, sizes: Mapping[Any, tuple[int, int]]) -> tuple[str, Stored]:
    name = reader.text(reader.number("Q"))
    dimensions = reader.number("I")
    if dimensions > 4:
        raise reader.wrong(f"{name:.60} has {dimensions} dimensions")
    shape = tuple(reversed(reader.numbers(f"{dimensions}Q")))  # the innermost comes first in the file
    kind, offset = reader.numbers("IQ")
    known = {int(each): size for each, size in sizes.items()}
    if kind not in known:
        raise UserError(f"{reader.path}: {name:.60}: tensors of type {kind} are not known to the gguf library")
    block, stride = known[kind]
    if not shape or not all(shape) or shape[-1] % block:
        raise reader.wrong(f"{name:.60} of shape {shape} is empty, or not made of whole blocks")
    return name, Stored(kind, shape, offset, math.prod(shape) // block * stride)


def _dequantized(reader: Reader, name: str, stored: Stored) -> Tensor:
    """A tensor in fp32."""
    quants = library("gguf.quants")
    kind = library("gguf").GGMLQuantizationType(stored.kind)
    raw = np.frombuffer(reader.data, np.uint8, stored.size, stored.offset)
    if kind.name not in ("F32", "F16", "BF16") and not kind.name.startswith("Q"):
        raise UserError(f"{reader.path}: {name:.60}: weights of type {kind.name} cannot be represented here")
    try:
        found = quants.dequantize(raw.reshape(*stored.shape[:-1], -1), kind)
    except NotImplementedError:
        raise UserError(f"{reader.path}: {name:.60}: the gguf library cannot read {kind.name}") from None
    return torch.from_numpy(np.array(found, np.float32)).reshape(stored.shape)


def _config(fields: Fields, found: Mapping[str, Tensor], factors: Tensor | None) -> ModelConfig:
    fields.must("several experts", "llama.expert_count", 0)
    fields.must("attention to what comes later", "llama.attention.causal", True)
    fields.must("rotary scaling of this kind", "llama.rope.scaling.type", "none")
    for key in ("factor", "attn_factor"):  # of llama.cpp's default kind, linear
        fields.must("rotary scaling of this kind", f"llama.rope.scaling.{key}", 1.0, 0.0)
    fields.must("rotary scaling of this kind", "llama.rope.scale_linear", 1.0, 0.0)
    for key in ("attention.scale", "attention.clamp_kqv", "embedding_scale", "residual_scale", "logit_scale"):
        fields.must("a scale or a limit of its own", f"llama.{key}", 0.0)
    words = fields.data.get("tokenizer.ggml.tokens")
    heads, dim = fields.whole("llama.attention.head_count"), fields.whole("llama.embedding_length")
    head_dim = fields.whole("llama.attention.key_length", dim // max(1, heads))
    fields.must("rotation of a part of each head", "llama.rope.dimension_count", head_dim)
    fields.must("values narrower than keys", "llama.attention.value_length", head_dim)
    settings: dict[str, Any] = {
        **KIND,
        "decoder_layers": fields.whole("llama.block_count"),
        "dim": dim,
        "heads": heads,
        "kv_heads": fields.whole("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "ff_dim": fields.whole("llama.feed_forward_length"),
        "norm_eps": fields.number("llama.attention.layer_norm_rms_epsilon"),
        "max_positions": fields.whole("llama.context_length"),
        "rope_theta": fields.number("llama.rope.freq_base", 10_000.0),
        "vocab_size": fields.whole("llama.vocab_size", len(words) if isinstance(words, list) else 0),
        "tie": "none" if "output.weight" in found else "output",
    }
    if fields.has("llama.attention.sliding_window"):
        settings |= {"attention": "window", "window": fields.whole("llama.attention.sliding_window")}
    config = ModelConfig.build(settings, where=str(fields.where))
    return config if factors is None else _scaled(config, factors, fields)


def _scaled(config: ModelConfig, factors: Tensor, fields: Fields) -> ModelConfig:
    """Llama 3's rule, where the stretch of each frequency in the file is what the rule gives."""
    said = {"factor": float(factors.max()), **LLAMA3}  # or what we wrote beside it
    said = {key: fields.number(f"{RULE}.{key}", value) for key, value in said.items()}
    whole = {key: int(value) for key, value in said.items() if value.is_integer()}
    rule = RopeScaling.build(said | whole, where=f"{fields.where}: rope_freqs")
    turns = rope_frequencies(config, torch.device("cpu"))
    if factors.shape != turns.shape or not torch.allclose(
        turns / scale_rope_frequencies(turns, rule), factors, rtol=1e-3
    ):
        raise UserError(f"{fields.where}: rope_freqs: a stretch other than Llama 3's cannot be represented here")
    return config.model_copy(update={"rope_scaling": rule})


def _tokenizer(fields: Fields, size: int) -> Tokenizer:
    tokens, kinds = _list(fields, "tokens", str), _list(fields, "token_type", int)
    kinds = kinds or [NORMAL] * len(tokens)
    if not 0 < len(tokens) <= size:
        raise UserError(f"{fields.where}: tokenizer.ggml.tokens: {len(tokens):,} tokens for {size:,} rows of the model")
    if len(kinds) != len(tokens):
        raise UserError(f"{fields.where}: tokenizer.ggml.tokens and token_type are not of one length")
    control = [number for number, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)]
    added = [number for number, kind in enumerate(kinds) if kind == ADDED]
    match fields.text("tokenizer.ggml.model"):
        case "gpt2":
            words = fields.text("tokenizer.ggml.pre", "default")
            return bytes_with_merges(tokens, _list(fields, "merges", str), words, control, added, fields.where)
        case "llama":
            scores = _list(fields, "scores", float)
            if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
                raise UserError(f"{fields.where}: tokenizer.ggml.scores are not a number for each token")
            unknown = fields.whole("tokenizer.ggml.unknown_token_id", 0)
            if not 0 <= unknown < len(tokens):
                raise UserError(f"{fields.where}: tokenizer.ggml.unknown_token_id: {unknown} is no token")
            front = fields.flag("tokenizer.ggml.add_space_prefix", True)
            return pieces_with_scores(tokens, scores, unknown, control, added, front, fields.where)
        case other:
            raise UserError(f"{fields.where}: tokenizer.ggml.model: {other!r:.40} cannot be represented here")


def _list(fields: Fields, key: str, kind: type) -> list[Any]:
    found = fields.data.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise UserError(f"{fields.where}: tokenizer.ggml.{key} is no list of {kind.__name__}")
    return found


def _extra(fields: Fields, tokenizer: Tokenizer) -> dict[str, Any]:
    """What begins and ends a text, as llama.cpp does it, and the chat template."""
    size, said = len(tokenizer), fields.data.get
    ids = {role: fields.whole(f"tokenizer.ggml.{role}_token_id", -1) for role in ("bos", "eos", "eot", "eom")}
    usual = said("tokenizer.ggml.model") == "llama" or said("tokenizer.ggml.pre") == WHOLE
    first = fields.flag("tokenizer.ggml.add_bos_token", usual)
    ends = [ids[role] for role in ("eos", "eot", "eom")] + [tokenizer.vocabulary.get(token, -1) for token in ENDS]
    extra: dict[str, Any] = {
        "begin": [ids["bos"]] if first and 0 <= ids["bos"] < size else [],
        "ends": list(dict.fromkeys(each for each in ends if 0 <= each < size)),
    }
    if fields.has("tokenizer.chat_template"):
        extra["chat_template"] = fields.text("tokenizer.chat_template")
    return {key: value for key, value in extra.items() if value or key == "begin"}
