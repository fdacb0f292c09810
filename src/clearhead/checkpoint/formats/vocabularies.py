"""Tokenizers out of bare vocabularies: byte-level BPE with merges (GPT-2, Llama 3), pieces with scores (Llama 2)."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from clearhead.errors import UserError
from clearhead.text import Tokenizer

LLAMA3 = (  # how Llama 3 cuts a text into words, as its tokenizer publishes it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ("gpt-2", "smollm", "llama-bpe")
LONGEST = 512  # characters of a piece, of which every cut is tried
WHOLE = "llama-bpe"  # there, a word that is a token is taken whole


def _words(name: str) -> Any | None:
    """How a text is cut into words before its bytes are joined, by the name that GGUF has for it."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "gpt-2":
            return byte_level
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        case "llama-bpe":
            split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return None


def cut_of(name: str) -> Any:
    """The same as tokenizer.json writes it."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = _words(name)
    return json.loads(engine.to_str())["pre_tokenizer"]


def bytes_with_merges(
    tokens: Sequence[str],
    merges: Sequence[str],
    words: str,
    control: Sequence[int],
    added: Sequence[int],
    where: object,
) -> Tokenizer:
    """Byte-level BPE; `control` tokens are special, `added` ones are found whole in any text."""
    cut = _words(words)
    if cut is None:
        raise UserError(f"{where}: tokenizer.ggml.pre: {words!r:.40} cannot be represented here")
    vocabulary = _numbered(tokens, where)
    pairs = []
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise UserError(f"{where}: merge {number + 1} ({merge!r:.40}) is not made of tokens")
        pairs.append((left, right))
    engine = Engine(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, ignore_merges=words == WHOLE))
    engine.pre_tokenizer = cut
    engine.decoder = decoders.ByteLevel()
    return _with_added(engine, tokens, control, added)


def pieces_with_scores(
    tokens: Sequence[str], scores: Sequence[float], unknown: int, control: Sequence[int], added: Sequence[int],
    space_in_front: bool, where: object,
) -> Tokenizer:  # fmt: skip
    """SentencePiece's BPE: of all neighbors, those that make the piece of the best score are joined first."""
    vocabulary = _numbered(tokens, where)
    if long := next((piece for piece in tokens if len(piece) > LONGEST), None):
        raise UserError(
            f"{where}: a token of {len(long):,} characters ({long:.20}…); at most {LONGEST} can be read here"
        )
    joins, never = [], set(control)  # no text is ever one of these
    for piece, number in vocabulary.items():
        if number in never:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                joins.append((-scores[number], vocabulary[left], vocabulary[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(joins)]
    engine = Engine(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if space_in_front else [spaces])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    engine.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if space_in_front else parts)
    return _with_added(engine, tokens, control, added)


def _numbered(tokens: Sequence[str], where: object) -> dict[str, int]:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise UserError(f"{where}: the vocabulary has a token twice")
    return vocabulary


def _with_added(engine: Engine, tokens: Sequence[str], control: Sequence[int], added: Sequence[int]) -> Tokenizer:
    engine.add_special_tokens([AddedToken(tokens[each], normalized=False, special=True) for each in control])
    engine.add_tokens([AddedToken(tokens[each], normalized=False, special=False) for each in added])
    return Tokenizer(engine)
