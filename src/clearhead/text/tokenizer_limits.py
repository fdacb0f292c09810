"""Limits on tokenizer.json, checked before the engine loads it: no step may multiply a text without bound.

The engine cannot be interrupted, and normalizes added tokens while it loads. What only running can show (regexes that
backtrack, damaged tables) is tried after loading, in tokenizer.py.
"""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from clearhead.limits import MAX_JSON_BYTES

MAX_ID = 1 << 24
MAX_STEPS = 64  # of one chain; published tokenizers have up to 20
MAX_PATTERN_CHARS = 1 << 13
MAX_TOKEN_CHARS = 1 << 10  # published vocabularies have up to 128
MAX_AFFIX_CHARS = 64  # of what is put before or after each piece of a word
MAX_WORD_CHARS = 1000  # WordPiece's time is quadratic in it; published tokenizers have 100 or 200
MAX_NORMALIZED_CHARS = 128  # of an added token: its text and the regex that it meets are of the same hand
MAX_ADDED_CHARS = 1 << 26  # of all added tokens, normalized
MAX_TEMPLATE_PIECES = 64

Step = Mapping[str, Any]
Growth = Callable[[Step], float]  # the most characters that a step makes of one


def check(text: str) -> dict[str, Any]:
    """Return the settings of a tokenizer.json; raise ValueError with the reason if they exceed a limit."""
    try:
        settings = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(settings, dict):
        raise ValueError("not an object")
    growth = 1.0
    for name, (kinds, children, limit) in CHAINS.items():
        growth_of_chain = 1.0
        for count, step in enumerate(_steps(settings.get(name), name, kinds, children), start=1):
            if count > MAX_STEPS:
                raise ValueError(f"{name}: more than {MAX_STEPS} steps")
            growth_of_chain *= kinds[step["type"]](step)
            if growth_of_chain > limit:
                raise ValueError(f"{name}: its steps may make more than {limit:,} characters of one")
        if name == "normalizer":
            growth = growth_of_chain
    _check_added(settings.get("added_tokens"), growth, settings.get("normalizer") is not None)
    _check_model(settings.get("model"))
    return settings


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; of a key given twice, the engine may take another value than json."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key of an object is given twice")
    return result


def _steps(step: Any, name: str, kinds: Mapping[str, Growth], children: str, depth: int = 0) -> Iterator[Step]:
    """Yield the steps of a chain; the engine ignores an unknown type and guesses by the other keys."""
    if step is None and depth == 0:
        return
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Sequence" and isinstance(step.get(children), list) and depth < MAX_STEPS:
        for each in step[children]:
            yield from _steps(each, name, kinds, children, depth + 1)
    elif isinstance(kind, str) and kind in kinds:
        yield step
    else:
        raise ValueError(f"{name}: a step of type {kind!r:.40} is not supported")


def _text(step: Step, key: str, limit: int = MAX_PATTERN_CHARS) -> str:
    value = step.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{step['type']}: {key} is not a string")
    if len(value) > limit:
        raise ValueError(f"{step['type']}: {key} has more than {limit:,} characters")
    return value


def _pattern(step: Step) -> tuple[str, bool]:
    """Return the pattern of a step, and whether it is a regex."""
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or len(pattern) != 1 or next(iter(pattern)) not in ("String", "Regex"):
        raise ValueError(f"{step['type']}: pattern is not a String or a Regex")
    kind = next(iter(pattern))
    return _text({"type": step["type"], **pattern}, kind), kind == "Regex"


def _replace(step: Step) -> float:
    (pattern, regex), content = _pattern(step), _text(step, "content")
    # a regex may match between any two characters
    return 1 + len(content) if regex or not pattern else max(1, len(content) / len(pattern))


def _split(step: Step) -> float:
    _pattern(step)
    return 1


def _fixed_length(step: Step) -> float:
    if type(step.get("length")) is not int or step["length"] < 1:
        raise ValueError("FixedLength: length is not a positive number")
    return 1


def _precompiled(step: Step) -> float:
    """Return the longest replacement of SentencePiece's table: its trie, then strings that end with a zero byte."""
    table = base64.b64decode(_text(step, "precompiled_charsmap", MAX_JSON_BYTES), validate=True)
    start = 4 + int.from_bytes(table[:4], "little")
    if len(table) < 4 or start > len(table):
        raise ValueError("Precompiled: the table is cut off")
    return max((len(each.decode(errors="replace")) for each in table[start:].split(b"\0")), default=1) or 1


def _affix(*keys: str) -> Growth:
    def check(step: Step) -> float:
        # an empty string is found between any two characters
        return 1 + sum(not _text(step, key, MAX_AFFIX_CHARS) for key in keys)

    return check


def _times(growth: float) -> Growth:
    return lambda step: growth


def _template(step: Step) -> float:
    """Check that a template keeps one text as it is, between special tokens that exist."""
    special = step.get("special_tokens")
    for key in ("single", "pair"):
        pieces = step.get(key)
        if not isinstance(pieces, list) or not isinstance(special, dict) or len(pieces) > MAX_TEMPLATE_PIECES:
            raise ValueError(f"TemplateProcessing: {key} is not a list of at most {MAX_TEMPLATE_PIECES} pieces")
        if not all(isinstance(piece, dict) and len(piece) == 1 for piece in pieces):
            raise ValueError(f"TemplateProcessing: {key} has a piece that is not one")
        texts = [piece["Sequence"] for piece in pieces if "Sequence" in piece]
        if key == "single" and [each.get("id") if isinstance(each, dict) else None for each in texts] != ["A"]:
            raise ValueError("TemplateProcessing: single does not have the text $A once")
    for token in special.values() if isinstance(special, dict) else ():
        ids = token.get("ids") if isinstance(token, dict) else None
        if not isinstance(ids, list) or len(ids) > MAX_TEMPLATE_PIECES:
            raise ValueError(f"TemplateProcessing: a special token has no list of at most {MAX_TEMPLATE_PIECES} ids")
    return 1


def _check_added(tokens: Any, growth: float, has_normalizer: bool) -> None:
    """Check added tokens, which the engine normalizes."""
    added = [] if tokens is None else tokens
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ValueError("added_tokens: not a list of tokens")
    contents = [token.get("content") for token in added]
    if not all(isinstance(content, str) for content in contents):
        raise ValueError("added_tokens: a token without content")
    normalized = [token["content"] for token in added if token.get("normalized", True) is not False]
    if has_normalizer and max(map(len, normalized), default=0) > MAX_NORMALIZED_CHARS:
        raise ValueError(f"added_tokens: a token to normalize has more than {MAX_NORMALIZED_CHARS:,} characters")
    if any(len(content) > MAX_TOKEN_CHARS for content in contents):
        raise ValueError(f"added_tokens: a token has more than {MAX_TOKEN_CHARS:,} characters")
    if growth * sum(map(len, contents)) > MAX_ADDED_CHARS:
        raise ValueError("added_tokens: too long, or the normalizer makes too much of them")
    if any(type(token.get("id")) is int and not 0 <= token["id"] < MAX_ID for token in added):
        raise ValueError(f"added_tokens: ids range from 0 to {MAX_ID - 1:,}")


def _check_model(model: Any) -> None:
    """Check the sizes of a model: token lengths, ids, affixes."""
    if not isinstance(model, dict):
        raise ValueError("model is missing")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        if not all(type(number) is int and 0 <= number < MAX_ID for number in vocabulary.values()):
            raise ValueError(f"model: ids range from 0 to {MAX_ID - 1:,}")
        names: list[Any] = list(vocabulary)
    else:
        entries = vocabulary if isinstance(vocabulary, list) else []
        names = [entry[0] for entry in entries if isinstance(entry, list) and entry and isinstance(entry[0], str)]
    if max(map(len, names), default=0) > MAX_TOKEN_CHARS:
        raise ValueError(f"model: a token has more than {MAX_TOKEN_CHARS:,} characters")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model.get(key), str) and len(model[key]) > MAX_AFFIX_CHARS:
            raise ValueError(f"model: {key} has more than {MAX_AFFIX_CHARS} characters")
    length = model.get("max_input_chars_per_word", 0)
    if type(length) is not int or length > MAX_WORD_CHARS:
        raise ValueError(f"model: max_input_chars_per_word is more than {MAX_WORD_CHARS:,}")


# Growths of Unicode forms are those of the worst character, such as U+FDFA with 18 letters.
NORMALIZERS: dict[str, Growth] = {
    "BertNormalizer": _times(3), "ByteLevel": _times(4), "Lowercase": _times(3), "NFC": _times(3), "NFD": _times(4),
    "NFKC": _times(18), "NFKD": _times(18), "Nmt": _times(1), "Precompiled": _precompiled,
    "Prepend": lambda step: 1 + len(_text(step, "prepend", MAX_AFFIX_CHARS)), "Replace": _replace, "Strip": _times(1),
    "StripAccents": _times(1),
}  # fmt: skip
PRE_TOKENIZERS: dict[str, Growth] = {
    "BertPreTokenizer": _times(1), "ByteLevel": _times(4), "CharDelimiterSplit": _times(1), "Digits": _times(1),
    "FixedLength": _fixed_length, "Metaspace": _times(2), "Punctuation": _times(1), "Split": _split,
    "UnicodeScripts": _times(1), "Whitespace": _times(1), "WhitespaceSplit": _times(1),
}  # fmt: skip
POST_PROCESSORS: dict[str, Growth] = {
    "BertProcessing": _times(1), "ByteLevel": _times(1), "RobertaProcessing": _times(1),
    "TemplateProcessing": _template,
}  # fmt: skip
DECODERS: dict[str, Growth] = {
    "BPEDecoder": _affix("suffix"), "ByteFallback": _times(1), "ByteLevel": _times(1),
    "CTC": _affix("pad_token", "word_delimiter_token"), "Fuse": _times(1), "Metaspace": _times(1),
    "Replace": _replace, "Strip": _times(1), "WordPiece": _affix("prefix"),
}  # fmt: skip
CHAINS: dict[str, tuple[dict[str, Growth], str, int]] = {  # types, where a Sequence has its steps, largest growth
    "normalizer": (NORMALIZERS, "normalizers", 1 << 14),
    "pre_tokenizer": (PRE_TOKENIZERS, "pretokenizers", 1 << 6),
    "post_processor": (POST_PROCESSORS, "processors", 1),
    "decoder": (DECODERS, "decoders", 1 << 4),
}
