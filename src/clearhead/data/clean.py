"""What is done to raw text before it is tokenized: normal forms, lower case, duplicates, a held-out part."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clearhead.config.data import DataConfig
from clearhead.data.formats import TEXTS, Record
from clearhead.errors import UserError

Part = Literal["all", "kept", "held out"]


class Cleaner:
    """Records in, clean records out; counts what it leaves out and why.

    `both` gives every pair a second time with its texts exchanged. Its part is that of the pair as it stands, so that a
    pair that is held out is learned from in neither order; duplicates are looked for after, so each order stays once.
    """

    def __init__(self, config: DataConfig, columns: tuple[str, ...], part: Part = "all", both: bool = False):
        self.config, self.part, self.both = config, part, both
        self.columns = columns
        self.dropped: Counter[str] = Counter()
        self.seen = Seen()

    def chunk(self, records: list[Record]) -> list[Record]:
        """Those of a chunk of records that stay, cleaned."""
        clean = [self._record(record) for record in records]
        if self.part != "all":
            held = self.config.held_out
            wanted = self.part == "held out"
            clean = [record for record in clean if (share(record.group or record.values[0]) < held) == wanted]
        if self.both:
            clean = [each for record in clean for each in (record, exchanged(record))]
        if self.config.deduplicate and clean:
            new = self.seen.first_time(np.array([digest(record.values) for record in clean], np.uint64))
            self.dropped["duplicate"] += int((~new).sum())
            clean = [record for record, is_new in zip(clean, new, strict=True) if is_new]
        return clean

    def _record(self, record: Record) -> Record:
        values = list(record.values)
        for place, name in enumerate(self.columns):
            if name == "tokens" and isinstance(values[place], list):
                values[place] = [self._text(record, each) for each in values[place]]
            elif name in TEXTS:  # labels, tags and answers stay as they are
                values[place] = self._text(record, values[place])
        return record._replace(values=tuple(values))

    def _text(self, record: Record, value: Any) -> str:
        check_text(record, value)
        value = cleaned(value, self.config)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(value[error.start]):04X}"
            raise UserError(f"{record.place}: {half} is half of a surrogate pair, no character; replace it") from None
        return value


def check_text(record: Record, value: Any) -> None:
    """Refuse a value that should be a text and is none."""
    if not isinstance(value, str):
        raise UserError(f"{record.place}: {value!r:.40} is {type(value).__name__}, not a text; put it in quotes")


def exchanged(record: Record) -> Record:
    """A pair with its texts the other way round."""
    first, second, *rest = record.values
    return record._replace(values=(second, first, *rest))


def cleaned(text: str, config: DataConfig) -> str:
    """A text in the normal form and case that the settings ask for: in training, and of whatever a model is given."""
    if config.normalize != "none":
        text = unicodedata.normalize("NFC" if config.normalize == "nfc" else "NFKC", text)
    return text.lower() if config.lowercase else text


def digest(value: Any) -> int:
    """64 bits that stand for a value."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def share(value: Any) -> float:
    """A number in [0, 1) that depends on the value alone, so that equal source sides fall to the same part."""
    return digest(value) / 2**64


class Seen:
    """The digests met so far, eight bytes each, in sorted runs whose sizes double, so that a look-up is quick."""

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []

    def first_time(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """True where a digest is met for the first time; remembers all of them."""
        new = np.zeros(len(digests), bool)
        new[np.unique(digests, return_index=True)[1]] = True
        for run in self.runs:
            place = np.searchsorted(run, digests)
            new &= run[np.minimum(place, len(run) - 1)] != digests
        if new.any():
            run = np.sort(digests[new])
            while self.runs and len(self.runs[-1]) <= 2 * len(run):
                run = np.sort(np.concatenate([self.runs.pop(), run]))
            self.runs.append(run)
        return new


def chunks(records: Iterator[Record], most: int = 4096, characters: int = 1 << 20) -> Iterator[list[Record]]:
    """Records in lists of a bounded size, so that many are tokenized at once and few are in memory."""
    found: list[Record] = []
    size = 0
    for record in records:
        found.append(record)
        size += sum(len(value) for value in record.values if isinstance(value, str | list))
        if len(found) >= most or size >= characters:
            yield found
            found, size = [], 0
    if found:
        yield found
