"""How well a tokenizer fits a text, in numbers that two tokenizers can be compared by."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from clearhead.errors import UserError
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Stats:
    """What a tokenizer made of a text."""

    lines: int
    words: int
    bytes: int
    tokens: int
    tokens_per_word: float
    bytes_per_token: float
    unknown_rate: float
    vocabulary: int
    vocabulary_used: float  # share of the vocabulary that occurs
    round_trip: float  # share of lines that come back exactly
    lengths: dict[int, int]  # tokens by their number of characters


def measure(tokenizer: Tokenizer, lines: Iterable[str]) -> Stats:
    """Encode every line and count; memory does not grow with the text."""
    count = words = size = same = 0
    seen: Counter[int] = Counter()
    rest = iter(lines)
    while chunk := list(islice(rest, 1000)):
        rows = tokenizer.encode_batch(chunk)
        for line, ids, back in zip(chunk, rows, tokenizer.decode_batch(rows, specials=True), strict=True):
            count += 1
            words += len(line.split())
            size += len(line.encode())
            same += line == back
            seen.update(ids)
    tokens = seen.total()
    if not tokens:
        raise UserError("there is no text to measure; give files that are not empty")
    lengths: Counter[int] = Counter()
    for number, times in seen.items():
        lengths[len(tokenizer.decode([number], specials=True).strip()) or 1] += times
    unknown = seen[tokenizer.roles["unknown"]] if "unknown" in tokenizer.roles else 0
    return Stats(
        lines=count,
        words=words,
        bytes=size,
        tokens=tokens,
        tokens_per_word=tokens / max(1, words),
        bytes_per_token=size / tokens,
        unknown_rate=unknown / tokens,
        vocabulary=len(tokenizer),
        vocabulary_used=len(seen) / len(tokenizer),
        round_trip=same / count,
        lengths=dict(sorted(lengths.items())),
    )
