"""Warn about texts that a model was not made for: unknown to its tokenizer, or in another script."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.text import Tokenizer

CHECKED_CHARS = 1000  # of each text
KNOWN_SHARE = 0.05  # of the tokens with letters; a script with fewer comes from stray quotations
SCRIPTS = {
    "LATIN": "Latin letters",
    "CJK": "Chinese characters",
    "HIRAGANA": "Japanese kana",
    "KATAKANA": "Japanese kana",
    "HANGUL": "Korean letters",
    "CYRILLIC": "Cyrillic letters",
    "GREEK": "Greek letters",
    "ARABIC": "Arabic letters",
    "HEBREW": "Hebrew letters",
    "DEVANAGARI": "Devanagari letters",
    "BENGALI": "Bengali letters",
    "TAMIL": "Tamil letters",
    "THAI": "Thai letters",
    "GEORGIAN": "Georgian letters",
    "ARMENIAN": "Armenian letters",
    "ETHIOPIC": "Ethiopic letters",
}


class UnfamiliarTexts:
    """Counts the texts that a tokenizer maps mostly to unknown tokens, and those in a script it hardly has."""

    def __init__(self, tokenizer: "Tokenizer"):
        self.tokenizer, self.total, self.unknown = tokenizer, 0, 0
        self.scripts = Counter[str]()
        self.known: set[str] | None = None

    def add(self, texts: Sequence[str]) -> None:
        """Count the texts of one record."""
        self.total += 1
        text = " ".join(each[:CHECKED_CHARS] for each in texts)
        letters = Counter(filter(None, map(script, text)))
        foreign = letters.keys() - self._known_scripts() if letters else set()
        if 2 * sum(letters[name] for name in foreign) > letters.total() > 1:
            self.scripts[max(foreign, key=letters.__getitem__)] += 1
        elif "unknown" in self.tokenizer.roles:
            ids = self.tokenizer.encode(text)
            self.unknown += 2 * ids.count(self.tokenizer.roles["unknown"]) > len(ids)

    def warnings(self, unit: str) -> Iterator[str]:
        """One line for each kind, with its count."""
        units = f"{unit}s" if self.total > 1 else unit
        for name, count in self.scripts.most_common():
            yield (
                f"{count:,} of {self.total:,} {units}: {name}, which this model's tokenizer hardly knows; "
                "expect nonsense"
            )
        if self.unknown:
            yield (
                f"{self.unknown:,} of {self.total:,} {units}: mostly words or characters that this model's tokenizer "
                "does not know"
            )

    def _known_scripts(self) -> set[str]:
        if self.known is None:
            tokens = self.tokenizer.decode_batch([[number] for number in range(len(self.tokenizer))])
            counts = Counter(name for token in tokens for name in set(map(script, token)) if name)
            self.known = {name for name, count in counts.items() if count >= KNOWN_SHARE * counts.total()}
        return self.known


@cache
def script(character: str) -> str | None:
    """The script of a letter; None for other characters and rare scripts."""
    return SCRIPTS.get(unicodedata.name(character, "").partition(" ")[0]) if character.isalpha() else None
