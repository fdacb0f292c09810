"""CTranslate2's binary layout of version 2, as its first converters wrote plain Transformers: translators, pre-norm."""

import math
from pathlib import Path

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Engine
from torch import Tensor

from clearhead.checkpoint.folder import WEIGHTS
from clearhead.checkpoint.formats.binary import Reader, opened
from clearhead.checkpoint.formats.imported import Imported
from clearhead.checkpoint.formats.tables import SAME, Entry, Table, shapes_of, to_ours, under
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.files import read_lines
from clearhead.text import Tokenizer

FILE, VERSION = "model.bin", 2
HEADS = {"TransformerBase": 8, "TransformerBig": 16}  # not stored, but meant by the name
POSITIONS, UNKNOWN = 512, "<unk>"
STACKS = ("encoder", "decoder")
FILES = ("source_vocabulary.txt", "target_vocabulary.txt")

NORM: Table = {"weight": "layer_norm/gamma", "bias": "layer_norm/beta"}
LAYER: Table = {
    "attention.query.*": Entry("self_attention/linear_0/*", SAME, 0),
    "attention.key.*": Entry("self_attention/linear_0/*", SAME, 1),
    "attention.value.*": Entry("self_attention/linear_0/*", SAME, 2),
    "attention.output.*": "self_attention/linear_1/*",
    "cross_attention.query.*": "attention/linear_0/*",
    "cross_attention.key.*": Entry("attention/linear_1/*", SAME, 0),
    "cross_attention.value.*": Entry("attention/linear_1/*", SAME, 1),
    "cross_attention.output.*": "attention/linear_2/*",
    **under("attention_norm", "self_attention", NORM, "/"),
    **under("cross_norm", "attention", NORM, "/"),
    **under("feed_forward_norm", "ffn", NORM, "/"),
    "feed_forward.up.*": "ffn/linear_0/*",
    "feed_forward.down.*": "ffn/linear_1/*",
}
TABLE: Table = {
    "*.embedding.tokens.weight": "*/embeddings/weight",
    "*.embedding.positions.weight": "*/position_encodings/encodings",
    **under("*.layers.*", "*/layer_*", LAYER, "/"),
    **under("*.norm", "*", NORM, "/"),
    "heads.lm_head.proj.*": "decoder/projection/*",
}


def is_folder(source: Path) -> bool:
    """Whether this is a folder of CTranslate2; newer ones have a config.json, too."""
    return (source / FILE).is_file() and not (source / WEIGHTS).is_file()


def read(folder: Path) -> Imported:
    """A translator; its sinusoids, which the file leaves to the library, become a fixed table."""
    path = folder / FILE
    with opened(path) as reader:
        name, found = _variables(reader)
    tokens = [_tokens(folder / file) for file in FILES]
    config = _config(path, name, found, tokens)
    found |= {f"{stack}/position_encodings/encodings": sinusoids(POSITIONS, config.dim) for stack in STACKS}
    weights = to_ours(TABLE, shapes_of(config, found, path), found, path)
    tokenizers = tuple(_tokenizer(each, folder / file) for each, file in zip(tokens, FILES, strict=True))
    return Imported(config, weights, tokenizers, {"source_end": False}, f"CTranslate2, {name}")


def _tokens(path: Path) -> list[str]:
    """A token a line; the library adds the one for unknown tokens where the file has none."""
    tokens = list(read_lines(path))
    return tokens if UNKNOWN in tokens else [*tokens, UNKNOWN]


def sinusoids(positions: int, dim: int) -> Tensor:
    """CTranslate2's: sines, then cosines; the exponent over width/2 − 1; positions from 1. (positions, width)"""
    half = dim // 2
    steps = torch.exp(torch.arange(half, dtype=torch.float32) * (-math.log(10_000.0) / max(1, half - 1)))
    angles = torch.arange(1, positions + 1, dtype=torch.float32)[:, None] * steps
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _variables(reader: Reader) -> tuple[str, dict[str, Tensor]]:
    version = reader.number("I")
    if version != VERSION:
        raise UserError(f"{reader.path}: CTranslate2's layout of version {version} cannot be represented here; 2 can")
    name = _name(reader)
    if name not in HEADS:
        raise UserError(
            f"{reader.path}: a model of kind {name!r:.40} cannot be represented here; {', '.join(HEADS)} can"
        )
    reader.number("I")  # the revision of the kind
    count = reader.number("I")
    reader.room_for(count, 9, "variables")
    found: dict[str, Tensor] = {}
    for _ in range(count):
        key = _name(reader)
        rank = reader.number("B")
        shape = reader.numbers(f"{rank}I")
        size, items = reader.numbers("BI")
        if size != 4 or key.endswith("weight_scale"):
            raise UserError(f"{reader.path}: {key:.60}: quantized weights cannot be represented here; fp32 can")
        if key in found or not items or math.prod(shape) != items:
            raise reader.wrong(f"{key:.60} stands twice, is empty, or is not of its own shape")
        found[key] = torch.from_numpy(reader.array("<f4", items).copy()).reshape(shape)
    if reader.at != reader.size:
        raise reader.wrong(f"{reader.size - reader.at:,} bytes are left over")
    return name, found


def _name(reader: Reader) -> str:
    return reader.text(reader.number("H")).removesuffix("\0")


def _config(path: Path, name: str, found: dict[str, Tensor], tokens: list[list[str]]) -> ModelConfig:
    def shape(key: str) -> torch.Size:
        if key not in found or found[key].dim() != 2:
            raise UserError(f"{path}: {key} is missing, or no matrix; is it a whole Transformer?")
        return found[key].shape

    source, target = shape("encoder/embeddings/weight"), shape("decoder/embeddings/weight")
    for file, each, size in zip(FILES, tokens, (source, target), strict=True):
        if len(each) != size[0]:
            raise UserError(f"{path.with_name(file)} has {len(each):,} tokens, but the model {size[0]:,}")
    layers = {stack: sum(f"{stack}/layer_{n}/ffn/linear_0/weight" in found for n in range(1024)) for stack in STACKS}
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
        "max_positions": POSITIONS,
        "scale_embedding": True,
        "source_vocab_size": source[0],
        "target_vocab_size": target[0],
        "output_bias": True,
    }
    return ModelConfig.build(settings, where=str(path))


def _tokenizer(tokens: list[str], path: Path) -> Tokenizer:
    """Characters where every token is one; else words between spaces, as whoever trained it cut them."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise UserError(f"{path} has a token twice")
    special = [token for token in tokens if token.startswith("<") and token.endswith(">")]
    engine = Engine(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    if all(len(token) == 1 for token in tokens if token not in special):
        engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        engine.decoder = decoders.Fuse()
    else:
        engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(special)
    return Tokenizer(engine)
