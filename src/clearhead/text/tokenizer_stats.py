"""Compression and coverage statistics of a tokenizer on a text."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from clearhead.errors import UserError
from clearhead.text.tokenizer import Tokenizer

CHUNK_SIZE = 1000  # lines per batch


@dataclass(frozen=True)
class TokenizerStats:
    """Statistics of a tokenizer on a text."""

    lines: int
    words: int
    bytes: int
    tokens: int
    tokens_per_word: float
    bytes_per_token: float
    unknown_rate: float
    vocab_size: int
    vocab_usage: float  # fraction of the vocabulary that occurs
    round_trip_rate: float  # fraction of lines that decode to the original
    token_lengths: dict[int, int]  # token counts by length in characters


def compute_stats(tokenizer: Tokenizer, lines: Iterable[str]) -> TokenizerStats:
    """Encode every line and count, in constant memory."""
    line_count = words = byte_count = exact = 0
    counts: Counter[int] = Counter()
    rest = iter(lines)
    while chunk := list(islice(rest, CHUNK_SIZE)):
        rows = tokenizer.encode_batch(chunk)
        for line, ids, decoded in zip(chunk, rows, tokenizer.decode_batch(rows, special_tokens=True), strict=True):
            line_count += 1
            words += len(line.split())
            byte_count += len(line.encode())
            exact += line == decoded
            counts.update(ids)
    tokens = counts.total()
    if not tokens:
        raise UserError("--file: no text to measure; give files that are not empty")
    lengths: Counter[int] = Counter()
    for token, count in counts.items():
        lengths[len(tokenizer.decode([token], special_tokens=True).strip()) or 1] += count
    unknown = counts[tokenizer.roles["unknown"]] if "unknown" in tokenizer.roles else 0
    return TokenizerStats(
        lines=line_count,
        words=words,
        bytes=byte_count,
        tokens=tokens,
        tokens_per_word=tokens / max(1, words),
        bytes_per_token=byte_count / tokens,
        unknown_rate=unknown / tokens,
        vocab_size=len(tokenizer),
        vocab_usage=len(counts) / len(tokenizer),
        round_trip_rate=exact / line_count,
        token_lengths=dict(sorted(lengths.items())),
    )
