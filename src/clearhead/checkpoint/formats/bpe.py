"""BPE tokenizers from vocabularies: byte-level with merges (GPT-2, Llama 3), SentencePiece with scores (Llama 2)."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from clearhead.errors import UserError
from clearhead.limits import MAX_MERGE_CHARS, MAX_MERGES
from clearhead.text import Tokenizer

LLAMA3_PATTERN = (  # as in its published tokenizer
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")  # one digit at a time
PRETOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")
NORMALIZERS = {"qwen2": {"type": "NFC"}}  # as tokenizer.json has it; the others have none
MAX_TOKEN_LENGTH = 512  # every split of a token is tried
LLAMA3_PRETOKENIZER = "llama-bpe"  # a word that is a token is not split further


def _pretokenizer(name: str) -> Any | None:
    """Return the pre-tokenizer of a GGUF name."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "gpt-2":
            return byte_level
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        case "llama-bpe" | "qwen2":
            pattern = LLAMA3_PATTERN if name == "llama-bpe" else QWEN2_PATTERN
            split = pre_tokenizers.Split(Regex(pattern), "isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return None


def pretokenizer_json(name: str) -> Any:
    """Return the pre-tokenizer of a GGUF name as tokenizer.json has it."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = _pretokenizer(name)
    return json.loads(engine.to_str())["pre_tokenizer"]


def without_trimming(settings: Any) -> Any:
    """Return a pre-tokenizer's settings without `trim_offsets`, which change no token."""
    if isinstance(settings, dict):
        return {key: without_trimming(value) for key, value in settings.items() if key != "trim_offsets"}
    return [without_trimming(each) for each in settings] if isinstance(settings, list) else settings


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    pretokenizer: str,
    control: Sequence[int],
    added: Sequence[int],
    where: object,
) -> Tokenizer:
    """Build byte-level BPE; `control` are special tokens, `added` are tokens matched in any text."""
    split = _pretokenizer(pretokenizer)
    if split is None:
        raise UserError(f"{where}: tokenizer.ggml.pre: {pretokenizer!r:.40} is not supported")
    vocabulary = _vocabulary(tokens, where)
    pairs = []
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise UserError(f"{where}: merge {number + 1} ({merge!r:.40}) is not made of two tokens that form a third")
        pairs.append((left, right))
    engine = Engine(
        models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, ignore_merges=pretokenizer == LLAMA3_PRETOKENIZER)
    )
    engine.pre_tokenizer = split
    if pretokenizer in NORMALIZERS:
        engine.normalizer = normalizers.NFC()
    engine.decoder = decoders.ByteLevel()
    return _with_added(engine, tokens, control, added, where)


def wordpiece(tokens: Sequence[str], control: Sequence[int], where: object) -> Tokenizer:
    """Build BERT's WordPiece; GGUF marks the first piece of a word with ▁ instead of the others with ##."""
    special = {*control}
    spelled = [
        token if number in special else token[1:] if token.startswith("▁") else f"##{token}"
        for number, token in enumerate(tokens)
    ]
    if "[UNK]" not in spelled:
        raise UserError(f"{where}: the vocabulary has no [UNK]")
    engine = Engine(models.WordPiece(_vocabulary(spelled, where), unk_token="[UNK]", max_input_chars_per_word=100))
    engine.normalizer = normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    return _with_added(engine, spelled, control, (), where)


def sentencepiece_bpe(
    tokens: Sequence[str], scores: Sequence[float], unknown: int, control: Sequence[int], added: Sequence[int],
    space_prefix: bool, where: object,
) -> Tokenizer:  # fmt: skip
    """Build SentencePiece's BPE: of all adjacent pairs, the one whose merge has the highest score is merged first."""
    vocabulary = _vocabulary(tokens, where)
    if long := next((token for token in tokens if len(token) > MAX_TOKEN_LENGTH), None):
        raise UserError(
            f"{where}: a token of {len(long):,} characters ({long:.20}…); at most {MAX_TOKEN_LENGTH} are supported"
        )
    candidates, chars, special = [], 0, set(control)  # text never becomes a control token
    for token, number in vocabulary.items():
        if number in special:
            continue
        for split in range(1, len(token)):
            left, right = token[:split], token[split:]
            if left in vocabulary and right in vocabulary:
                candidates.append((-scores[number], vocabulary[left], vocabulary[right]))
                chars += len(token)
        if len(candidates) > MAX_MERGES or chars > MAX_MERGE_CHARS:
            raise UserError(
                f"{where}: over {MAX_MERGES:,} merges, or {MAX_MERGE_CHARS:,} characters in them; "
                "use a smaller vocabulary"
            )
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(candidates)]
    engine = Engine(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if space_prefix else [spaces])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    engine.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if space_prefix else parts)
    return _with_added(engine, tokens, control, added, where)


def _vocabulary(tokens: Sequence[str], where: object) -> dict[str, int]:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise UserError(f"{where}: the vocabulary has duplicate tokens")
    return vocabulary


def _with_added(
    engine: Engine, tokens: Sequence[str], control: Sequence[int], added: Sequence[int], where: object
) -> Tokenizer:
    engine.add_special_tokens([AddedToken(tokens[each], normalized=False, special=True) for each in control])
    engine.add_tokens([AddedToken(tokens[each], normalized=False, special=False) for each in added])
    return Tokenizer(engine, str(where))
