"""llama2.c import: its first binary format, seven integers, then fp32 tensors stacked over layers."""

import math
from pathlib import Path

import torch
from torch import Tensor

from clearhead.checkpoint.formats.binary_reader import BinaryReader, open_binary
from clearhead.checkpoint.formats.bpe import sentencepiece_bpe
from clearhead.checkpoint.formats.gguf_architectures import table
from clearhead.checkpoint.formats.imported_model import ImportedModel
from clearhead.checkpoint.formats.llama import LLAMA_SETTINGS
from clearhead.checkpoint.formats.name_table import from_foreign
from clearhead.checkpoint.model_folder import meta_network
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.text import Tokenizer

UNKNOWN, BEGIN, END = 0, 1, 2
LATER_MAGIC = 0x616B3432  # of later versions
MAX_TOKEN_BYTES = 512


def read(path: Path) -> ImportedModel:
    """Read a model with the tokenizer in its folder: tok512.bin (named by its vocabulary size) or tokenizer.bin."""
    with open_binary(path) as reader:
        config = _config(reader)
        tensors = _read_tensors(reader, config)
    # The rotary layout is that of llama.cpp.
    weights = from_foreign(table(config), meta_network(config, tensors, path), tensors, path)
    names = (f"tok{config.vocab_size}.bin", "tokenizer.bin")
    file = next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)
    if file is None:
        raise UserError(f"{path.with_name(names[0])} is missing, and so is {names[1]}; copy the tokenizer there")
    tokenizers = (_tokenizer(file, config.target_vocab),)
    return ImportedModel(config, weights, tokenizers, {"begin": [BEGIN], "eos_ids": [END, BEGIN]}, "llama2.c, Llama")


def _config(reader: BinaryReader) -> ModelConfig:
    dim, ff_dim, layers, heads, kv_heads, signed_vocab_size, positions = reader.numbers("7i")
    if dim == LATER_MAGIC:
        raise UserError(f"{reader.path}: llama2.c's format version {ff_dim} is not supported; 0 is")
    settings = {
        **LLAMA_SETTINGS,
        "decoder_layers": layers,
        "dim": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "ff_dim": ff_dim,
        "norm_eps": 1e-5,
        "max_positions": positions,
        "vocab_size": abs(signed_vocab_size),
        "tie": "output" if signed_vocab_size > 0 else "none",
    }
    return ModelConfig.build(settings, where=str(reader.path))


def _read_tensors(reader: BinaryReader, config: ModelConfig) -> dict[str, Tensor]:
    """Read every tensor under its name in GGUF."""
    layers, dim, inner = config.decoder_layers, config.dim, config.kv_heads * config.head_dim
    shapes = {  # of one layer, in the order of the file
        "attn_norm": (dim,),
        "attn_q": (dim, dim),
        "attn_k": (inner, dim),
        "attn_v": (inner, dim),
        "attn_output": (dim, dim),
        "ffn_norm": (dim,),
        "ffn_gate": (config.ff_dim, dim),
        "ffn_down": (dim, config.ff_dim),
        "ffn_up": (config.ff_dim, dim),
    }
    tensors = {"token_embd.weight": _read_tensor(reader, config.target_vocab, dim)}
    for name, shape in shapes.items():
        block = _read_tensor(reader, layers, *shape)
        tensors |= {f"blk.{number}.{name}.weight": block[number] for number in range(layers)}
    tensors["output_norm.weight"] = _read_tensor(reader, dim)
    _read_tensor(reader, 2, config.max_positions, config.head_dim // 2)  # precomputed cosines and sines
    if config.tie == "none":
        tensors["output.weight"] = _read_tensor(reader, config.target_vocab, dim)
    if reader.position != reader.size:
        raise reader.error(f"{reader.size - reader.position:,} unexpected bytes at the end")
    return tensors


def _read_tensor(reader: BinaryReader, *shape: int) -> Tensor:
    return torch.from_numpy(reader.array("<f4", math.prod(shape)).copy()).reshape(shape)


def _tokenizer(path: Path, size: int) -> Tokenizer:
    """Read a SentencePiece BPE vocabulary with scores, in which spaces are not replaced by ▁."""
    tokens, scores = [], []
    with open_binary(path) as reader:
        reader.number("i")  # length of the longest token
        reader.check_count(size, 8, "tokens")
        for _ in range(size):
            scores.append(reader.number("f"))
            length = reader.number("i")
            if not 0 <= length <= MAX_TOKEN_BYTES:
                raise reader.error(f"a token of {length:,} bytes")
            tokens.append(reader.text(length).strip("\n").replace(" ", "▁"))
    return sentencepiece_bpe(tokens, scores, UNKNOWN, [UNKNOWN, BEGIN, END], [], True, path)
