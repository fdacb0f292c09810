"""CTranslate2 import: binary version 2, the pre-norm translators of its first converters."""

import math
from pathlib import Path

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Engine
from torch import Tensor

from clearhead.checkpoint.formats.binary_reader import BinaryReader, open_binary
from clearhead.checkpoint.formats.imported_model import ImportedModel
from clearhead.checkpoint.formats.name_table import SAME, Entry, NameTable, from_foreign, with_prefix
from clearhead.checkpoint.model_folder import WEIGHTS, meta_network
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.files import read_regular_lines
from clearhead.limits import MAX_TOKENS
from clearhead.text import Tokenizer

FILE, VERSION = "model.bin", 2
HEADS = {"TransformerBase": 8, "TransformerBig": 16}  # implied by the name of the specification
MAX_POSITIONS, UNKNOWN = 512, "<unk>"
STACKS = ("encoder", "decoder")
VOCABULARY_FILES = ("source_vocabulary.txt", "target_vocabulary.txt")

NORM: NameTable = {"weight": "layer_norm/gamma", "bias": "layer_norm/beta"}
LAYER: NameTable = {
    "attention.query.*": Entry("self_attention/linear_0/*", SAME, 0),
    "attention.key.*": Entry("self_attention/linear_0/*", SAME, 1),
    "attention.value.*": Entry("self_attention/linear_0/*", SAME, 2),
    "attention.output.*": "self_attention/linear_1/*",
    "cross_attention.query.*": "attention/linear_0/*",
    "cross_attention.key.*": Entry("attention/linear_1/*", SAME, 0),
    "cross_attention.value.*": Entry("attention/linear_1/*", SAME, 1),
    "cross_attention.output.*": "attention/linear_2/*",
    **with_prefix("attention_norm", "self_attention", NORM, "/"),
    **with_prefix("cross_norm", "attention", NORM, "/"),
    **with_prefix("feed_forward_norm", "ffn", NORM, "/"),
    "feed_forward.up.*": "ffn/linear_0/*",
    "feed_forward.down.*": "ffn/linear_1/*",
}
TABLE: NameTable = {
    "*.embedding.tokens.weight": "*/embeddings/weight",
    "*.embedding.positions.weight": "*/position_encodings/encodings",
    **with_prefix("*.layers.*", "*/layer_*", LAYER, "/"),
    **with_prefix("*.norm", "*", NORM, "/"),
    "heads.lm_head.proj.*": "decoder/projection/*",
}


def is_folder(source: Path) -> bool:
    """Whether this is a CTranslate2 folder; newer ones have a config.json, too."""
    return (source / FILE).is_file() and not (source / WEIGHTS).is_file()


def read(folder: Path) -> ImportedModel:
    """Read a translator; its sinusoids, which the file does not have, become learned positions."""
    path = folder / FILE
    with open_binary(path) as reader:
        name, tensors = _read_variables(reader)
    tokens = [_read_tokens(folder / file) for file in VOCABULARY_FILES]
    config = _config(path, name, tensors, tokens)
    tensors |= {f"{stack}/position_encodings/encodings": sinusoids(MAX_POSITIONS, config.dim) for stack in STACKS}
    weights = from_foreign(TABLE, meta_network(config, tensors, path), tensors, path)
    tokenizers = tuple(_tokenizer(each, folder / file) for each, file in zip(tokens, VOCABULARY_FILES, strict=True))
    return ImportedModel(config, weights, tokenizers, {"source_end": False}, f"CTranslate2, {name}")


def _read_tokens(path: Path) -> list[str]:
    """Read one token per line; the library appends the unknown token if it is missing."""
    tokens = list(read_regular_lines(path, MAX_TOKENS))
    return tokens if UNKNOWN in tokens else [*tokens, UNKNOWN]


def sinusoids(positions: int, dim: int) -> Tensor:
    """Return CTranslate2's sinusoids (T, D): sines, then cosines; exponents over D/2 − 1; positions from 1."""
    half = dim // 2
    steps = torch.exp(torch.arange(half, dtype=torch.float32) * (-math.log(10_000.0) / max(1, half - 1)))
    angles = torch.arange(1, positions + 1, dtype=torch.float32)[:, None] * steps
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _read_variables(reader: BinaryReader) -> tuple[str, dict[str, Tensor]]:
    version = reader.number("I")
    if version != VERSION:
        raise UserError(f"{reader.path}: CTranslate2's binary version {version} is not supported; {VERSION} is")
    name = _read_name(reader)
    if name not in HEADS:
        raise UserError(f"{reader.path}: specification {name!r:.40} is not supported; supported: {', '.join(HEADS)}")
    reader.number("I")  # revision of the specification
    count = reader.number("I")
    reader.check_count(count, 9, "variables")
    tensors: dict[str, Tensor] = {}
    for _ in range(count):
        key = _read_name(reader)
        rank = reader.number("B")
        shape = reader.numbers(f"{rank}I")
        size, items = reader.numbers("BI")
        if size != 4 or key.endswith("weight_scale"):
            raise UserError(f"{reader.path}: {key:.60}: quantized weights are not supported; convert the model to fp32")
        if key in tensors or not items or math.prod(shape) != items:
            raise reader.error(f"{key:.60} is duplicated, empty, or does not match its shape")
        tensors[key] = torch.from_numpy(reader.array("<f4", items).copy()).reshape(shape)
    if reader.position != reader.size:
        raise reader.error(f"{reader.size - reader.position:,} unexpected bytes at the end")
    return name, tensors


def _read_name(reader: BinaryReader) -> str:
    return reader.text(reader.number("H")).removesuffix("\0")


def _config(path: Path, name: str, tensors: dict[str, Tensor], tokens: list[list[str]]) -> ModelConfig:
    def shape(key: str) -> torch.Size:
        if key not in tensors or tensors[key].dim() != 2:
            raise UserError(f"{path}: {key} is missing or not a matrix; only complete Transformers are supported")
        return tensors[key].shape

    source, target = shape("encoder/embeddings/weight"), shape("decoder/embeddings/weight")
    for file, vocabulary, size in zip(VOCABULARY_FILES, tokens, (source, target), strict=True):
        if len(vocabulary) != size[0]:
            raise UserError(f"{path.with_name(file)} has {len(vocabulary):,} tokens, but the model {size[0]:,}")
    layers = {stack: sum(f"{stack}/layer_{n}/ffn/linear_0/weight" in tensors for n in range(1024)) for stack in STACKS}
    settings = {
        "family": "encoder-decoder",
        "encoder_layers": layers["encoder"],
        "decoder_layers": layers["decoder"],
        "dim": source[1],
        "heads": HEADS[name],
        "ff_dim": shape("encoder/layer_0/ffn/linear_0/weight")[0],
        "activation": "relu",
        "norm_position": "pre",
        "norm_eps": 1e-5,
        "position": "learned",
        "max_positions": MAX_POSITIONS,
        "scale_embedding": True,
        "source_vocab_size": source[0],
        "target_vocab_size": target[0],
        "output_bias": True,
    }
    return ModelConfig.build(settings, where=str(path))


def _tokenizer(tokens: list[str], path: Path) -> Tokenizer:
    """Split into characters if every token is one, else at spaces."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise UserError(f"{path} has duplicate tokens")
    special = [token for token in tokens if token.startswith("<") and token.endswith(">")]
    engine = Engine(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    if all(len(token) == 1 for token in tokens if token not in special):
        engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        engine.decoder = decoders.Fuse()
    else:
        engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(special)
    return Tokenizer(engine)
