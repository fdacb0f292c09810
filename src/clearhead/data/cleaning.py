"""Text cleaning before tokenization: Unicode normalization, lowercasing, deduplication, the held-out split."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clearhead.config.data import DataConfig
from clearhead.data.formats import TEXT_COLUMNS, Record
from clearhead.errors import UserError
from clearhead.limits import MAX_TEXT_CHARS

Split = Literal["all", "kept", "held out"]


class Cleaner:
    """Clean, split and deduplicate records; counts dropped records by reason.

    `swap_pairs` adds every pair in swapped order. The split is decided by the original order, so a held-out pair is
    trained on in neither order; deduplication comes last, so each order occurs once.
    """

    def __init__(self, config: DataConfig, columns: tuple[str, ...], split: Split = "all", swap_pairs: bool = False):
        self.config, self.split, self.swap_pairs = config, split, swap_pairs
        self.columns = columns
        self.dropped: Counter[str] = Counter()
        self.seen = DuplicateFilter()

    def clean_chunk(self, records: list[Record]) -> list[Record]:
        """Return the records of a chunk that remain, cleaned."""
        clean = [self._clean_record(record) for record in records]
        if self.split != "all":
            held_out = self.split == "held out"
            clean = [
                record
                for record in clean
                if (hash_fraction(record.group or record.values[0]) < self.config.held_out) == held_out
            ]
        if self.swap_pairs:
            clean = [each for record in clean for each in (record, swap_texts(record))]
        if self.config.deduplicate and clean:
            is_new = self.seen.add(np.array([hash64(record.values) for record in clean], np.uint64))
            self.dropped["duplicate"] += int((~is_new).sum())
            clean = [record for record, new in zip(clean, is_new, strict=True) if new]
        return clean

    def _clean_record(self, record: Record) -> Record:
        values = list(record.values)
        for index, name in enumerate(self.columns):
            if name == "tokens" and isinstance(values[index], list):
                values[index] = [self._clean_text(record, token) for token in values[index]]
            elif name in TEXT_COLUMNS:  # labels, tags and answers stay unchanged
                values[index] = self._clean_text(record, values[index])
        return record._replace(values=tuple(values))

    def _clean_text(self, record: Record, value: Any) -> str:
        check_text(record, value)
        value = normalize_text(value, self.config)
        if len(value) > MAX_TEXT_CHARS:
            raise UserError(
                f"{record.location}: a text of {len(value):,} characters; at most {MAX_TEXT_CHARS:,} are tokenized at "
                "once, so split it into several records"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(value[error.start]):04X}"
            raise UserError(f"{record.location}: {code} is half of a surrogate pair; replace it") from None
        return value


def check_text(record: Record, value: Any) -> None:
    """Raise if a text value is not a string."""
    if not isinstance(value, str):
        raise UserError(f"{record.location}: {value!r:.40} is {type(value).__name__}, not a text; put it in quotes")


def swap_texts(record: Record) -> Record:
    """Swap the two texts of a pair."""
    first, second, *rest = record.values
    return record._replace(values=(second, first, *rest))


def normalize_text(text: str, config: DataConfig) -> str:
    """Normalize and lowercase a text as configured, in training and inference."""
    if config.normalize != "none":
        text = unicodedata.normalize("NFC" if config.normalize == "nfc" else "NFKC", text)
    return text.lower() if config.lowercase else text


def hash64(value: Any) -> int:
    """Return a 64-bit hash of a value."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def hash_fraction(value: Any) -> float:
    """Hash a value to [0, 1): decides the held-out split, so equal source texts fall into the same part."""
    return hash64(value) / 2**64


class DuplicateFilter:
    """A set of 64-bit hashes, eight bytes each: sorted runs of doubling sizes, searched by bisection."""

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []

    def add(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add hashes; return which of them are new (B,)."""
        is_new = np.zeros(len(hashes), bool)
        is_new[np.unique(hashes, return_index=True)[1]] = True
        for run in self.runs:
            index = np.searchsorted(run, hashes)
            is_new &= run[np.minimum(index, len(run) - 1)] != hashes
        if is_new.any():
            run = np.sort(hashes[is_new])
            while self.runs and len(self.runs[-1]) <= 2 * len(run):
                run = np.sort(np.concatenate([self.runs.pop(), run]))
            self.runs.append(run)
        return is_new


def chunks(records: Iterator[Record], max_records: int = 4096, max_chars: int = 1 << 18) -> Iterator[list[Record]]:
    """Yield lists of records of bounded size, for batched tokenization in constant memory."""
    chunk: list[Record] = []
    size = 0
    for record in records:
        record_size = sum(map(_size, record.values))
        if chunk and (len(chunk) >= max_records or size + record_size > max_chars):
            yield chunk
            chunk, size = [], 0
        chunk.append(record)
        size += record_size
    if chunk:
        yield chunk


def _size(value: Any) -> int:
    """Return the number of characters of a text, or of a list of words."""
    words = value if isinstance(value, list) else [value]
    return sum(len(word) for word in words if isinstance(word, str))
