"""SentencePiece models (.spm, .model) as tokenizers: Unigram and BPE, with the ids of a separate vocab.json."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from clearhead.checkpoint import disk
from clearhead.checkpoint.formats.bpe import sentencepiece_bpe
from clearhead.errors import UserError
from clearhead.files import open_regular
from clearhead.text import Tokenizer

MAX_BYTES, MAX_PIECES, MAX_TOKENS = 64 << 20, 1 << 20, 1 << 20
NORMAL, USER_DEFINED = 1, 4  # types of pieces that text consists of
UNIGRAM, BPE = 1, 2  # kinds of models
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers
SPECIAL = ("<s>", "</s>", "<unk>", "<pad>", "<mask>")
SPACES = [normalizers.Strip(), normalizers.Replace(Regex(r" {2,}"), " ")]


class SentencePieceModel(NamedTuple):
    """What a file holds: pieces with their scores, the kind of model, and a table that normalizes text."""

    pieces: dict[str, float]  # those that text consists of
    kind: int
    charsmap: bytes
    where: Path


def read_model(path: Path) -> SentencePieceModel:
    """Read a file; every length is checked against its size."""
    with open_regular(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError(f"{path}: more than {MAX_BYTES:,} bytes, too large for a SentencePiece model")
    pieces: dict[str, float] = {}
    kind, charsmap = UNIGRAM, b""
    try:
        for field, value in _fields(data):
            if field == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                if piece.get(3, NORMAL) in (NORMAL, USER_DEFINED):
                    pieces[piece[1].decode()] = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            elif field == 2 and isinstance(value, bytes):
                kind = dict(_fields(value)).get(3, UNIGRAM)
            elif field == 3 and isinstance(value, bytes):
                charsmap = dict(_fields(value)).get(2, b"")
            if len(pieces) > MAX_PIECES:
                raise ValueError("too many pieces")
    except (ValueError, KeyError, AttributeError, TypeError, struct.error) as error:
        raise UserError(f"{path}: not a SentencePiece model ({error!s:.60}); download it again") from None
    if not pieces or not all(map(math.isfinite, pieces.values())) or kind not in (UNIGRAM, BPE):
        raise UserError(f"{path}: not a SentencePiece model of kind Unigram or BPE; download it again")
    return SentencePieceModel(pieces, kind, charsmap, path)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield numbers and values of the fields of a protocol buffer: integers, or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire, size = key & 7, 0
        if wire == VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == BYTES:
            size, position = _varint(data, position)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"a field of type {wire}")
        if size > len(data) - position:
            raise ValueError("it is truncated")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise ValueError("it is truncated")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
    raise ValueError("a number is too long")


def read_vocabulary(path: Path) -> list[str]:
    """Read vocab.json, tokens to ids, as a list; ids without a token have a placeholder."""
    vocabulary: Mapping[str, Any] = disk.read_json(path)
    ids = list(vocabulary.values())
    if not ids or len(ids) > MAX_TOKENS or any(type(each) is not int or not 0 <= each < MAX_TOKENS for each in ids):
        raise UserError(f"{path}: ids must be integers from 0 to {MAX_TOKENS - 1:,}")
    if len(set(ids)) < len(ids):
        raise UserError(f"{path}: an id is duplicated")
    tokens = [f"[unused {number}]" for number in range(max(ids) + 1)]
    for token, number in vocabulary.items():
        tokens[number] = token
    return tokens


def marian_tokenizers(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """Read source.spm and target.spm with the ids of vocab.json; >>deu<< in a source chooses its target language."""
    tokens = read_vocabulary(folder / "vocab.json")
    target_file = folder / "target_vocab.json"
    target = read_vocabulary(target_file) if target_file.is_file() else tokens
    source = _unigram(read_model(folder / "source.spm"), tokens, decodes=False)
    return source, _unigram(read_model(folder / "target.spm"), target, decodes=True)


def m2m100_tokenizer(folder: Path, file: Path) -> Tokenizer:
    """Read a BPE model with the ids of vocab.json; language codes follow, in the order of special_tokens_map.json."""
    model, tokens = read_model(file), read_vocabulary(folder / "vocab.json")
    special_file = folder / "special_tokens_map.json"
    special = disk.read_json(special_file) if special_file.is_file() else {}
    codes = special.get("additional_special_tokens", [])
    if not isinstance(codes, list) or not all(isinstance(code, str) for code in codes) or len(codes) > 1000:
        raise UserError(f"{special_file}: additional_special_tokens is not a list of up to 1,000 strings")
    tokens += [code for code in codes if code not in set(tokens)]
    if model.kind != BPE or "<unk>" not in tokens:
        raise UserError(f"{file}: only a BPE model with <unk> in vocab.json is supported here")
    control = [number for number, token in enumerate(tokens) if token in SPECIAL or token in codes]
    lowest = min(model.pieces.values()) - 1.0
    scores = [model.pieces.get(token, lowest) for token in tokens]
    tokenizer = sentencepiece_bpe(tokens, scores, tokens.index("<unk>"), control, [], True, file)
    engine = tokenizer.engine
    engine.normalizer = normalizers.Sequence([*SPACES, normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _checked(engine, model)


def _unigram(model: SentencePieceModel, tokens: Sequence[str], decodes: bool) -> Tokenizer:
    """Build a Unigram tokenizer; tokens that the model does not have are never found in a text to encode."""
    if model.kind != UNIGRAM or "<unk>" not in tokens:
        raise UserError(f"{model.where}: only a Unigram model with <unk> in vocab.json is supported here")
    lowest = min(model.pieces.values())
    added = [token for token in tokens if token in SPECIAL or (token.startswith(">>") and token.endswith("<<"))]
    kept = {*model.pieces, *added}
    names = [
        token if decodes or token in kept else f"\ue000{number}\ue000"  # of the other language
        for number, token in enumerate(tokens)
    ]
    vocabulary = [(name, model.pieces.get(token, lowest)) for name, token in zip(names, tokens, strict=True)]
    engine = Engine(models.Unigram(vocabulary, unk_id=tokens.index("<unk>"), byte_fallback=False))
    engine.normalizer = normalizers.Sequence(SPACES)
    engine.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    engine.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    engine.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in added if t in SPECIAL])
    engine.add_tokens([AddedToken(t, normalized=False, special=False) for t in added if t not in SPECIAL])
    return _checked(engine, model)


def _checked(engine: Engine, model: SentencePieceModel) -> Tokenizer:
    """Return the tokenizer with the model's normalization first; its table is checked before it is used."""
    settings = json.loads(engine.to_str())
    first = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()}
    steps = [*([first] if model.charsmap else []), *settings["normalizer"]["normalizers"]]
    settings["normalizer"] = {"type": "Sequence", "normalizers": steps}
    return Tokenizer.from_json(json.dumps(settings), str(model.where))
