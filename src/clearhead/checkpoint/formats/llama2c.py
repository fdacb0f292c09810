"""llama2.c's first binary layout: seven numbers, then every tensor in fp32, all layers of a kind in one block."""

from pathlib import Path

import torch
from torch import Tensor

from clearhead.checkpoint.formats import gguf
from clearhead.checkpoint.formats.binary import Reader, opened
from clearhead.checkpoint.formats.imported import Imported
from clearhead.checkpoint.formats.llama import KIND
from clearhead.checkpoint.formats.tables import shapes_of, to_ours
from clearhead.checkpoint.formats.vocabularies import pieces_with_scores
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.text import Tokenizer

UNKNOWN, BEGIN, END = 0, 1, 2
LATER = 0x616B3432  # how later versions begin
LONGEST = 512  # bytes of a token


def read(path: Path) -> Imported:
    """A model with the tokenizer beside it: tok512.bin (by the size of its vocabulary) or tokenizer.bin."""
    with opened(path) as reader:
        config = _config(reader)
        found = _tensors(reader, config)
    weights = to_ours(gguf.table(config), shapes_of(config, found, path), found, path)  # the rotary layout of llama.cpp
    names = (f"tok{config.vocab_size}.bin", "tokenizer.bin")
    file = next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)
    if file is None:
        raise UserError(f"{path.with_name(names[0])} is missing, and so is {names[1]}; put the tokenizer there")
    tokenizers = (_tokenizer(file, config.target_vocab),)
    return Imported(config, weights, tokenizers, {"begin": [BEGIN], "ends": [END, BEGIN]}, "llama2.c, Llama")


def _config(reader: Reader) -> ModelConfig:
    dim, ff_dim, layers, heads, kv_heads, words, positions = reader.numbers("7i")
    if dim == LATER:
        raise UserError(f"{reader.path}: llama2.c's layout of version {ff_dim} cannot be represented here; 0 can")
    settings = {
        **KIND,
        "decoder_layers": layers,
        "dim": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "ff_dim": ff_dim,
        "norm_eps": 1e-5,
        "max_positions": positions,
        "vocab_size": abs(words),
        "tie": "output" if words > 0 else "none",  # a sign says it
    }
    return ModelConfig.build(settings, where=str(reader.path))


def _tensors(reader: Reader, config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor under the name that GGUF has for it."""
    layers, dim, inner = config.decoder_layers, config.dim, config.kv_heads * config.head_dim
    every = {  # in the order of the file; the shape of one layer
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
    found = {"token_embd.weight": _take(reader, config.target_vocab, dim)}
    for name, shape in every.items():
        block = _take(reader, layers, *shape)
        found |= {f"blk.{number}.{name}.weight": block[number] for number in range(layers)}
    found["output_norm.weight"] = _take(reader, dim)
    _take(reader, 2, config.max_positions, config.head_dim // 2)  # cosines and sines, which we compute
    if config.tie == "none":
        found["output.weight"] = _take(reader, config.target_vocab, dim)
    if reader.at != reader.size:
        raise reader.wrong(f"{reader.size - reader.at:,} bytes are left over")
    return found


def _take(reader: Reader, *shape: int) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.from_numpy(reader.array("<f4", count).copy()).reshape(shape)


def _tokenizer(path: Path, size: int) -> Tokenizer:
    """Pieces with scores; spaces stand for themselves there, bytes as <0x0A>."""
    tokens, scores = [], []
    with opened(path) as reader:
        reader.number("i")  # the longest token
        reader.room_for(size, 8, "tokens")
        for _ in range(size):
            scores.append(reader.number("f"))
            length = reader.number("i")
            if not 0 <= length <= LONGEST:
                raise reader.wrong(f"a token of {length:,} bytes")
            tokens.append(reader.text(length).strip("\n").replace(" ", "▁"))
    return pieces_with_scores(tokens, scores, UNKNOWN, [UNKNOWN, BEGIN, END], [], True, path)
