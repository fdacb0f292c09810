"""The text and the bytes of single tokens, as logprobs show them."""

from __future__ import annotations

import re
from functools import cached_property

from clearhead.text import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Texts of the tokens of a vocabulary, with the space that a token begins with."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """What a token adds to a text; the vocabulary's spelling of one that adds none, or part of a character."""
        if token not in self._texts:
            self._texts[token] = self._text(token)
        return self._texts[token]

    def bytes(self, token: int) -> list[int]:
        """The bytes of a token, which need not be whole characters."""
        spelling = self.tokenizer.id_to_token(token)
        if byte := BYTE.fullmatch(spelling):
            return [int(byte[1], 16)]
        text = self.text(token)
        if text == spelling and all(letter in self._byte_letters for letter in spelling):
            return [self._byte_letters[letter] for letter in spelling]
        return list(text.encode())

    def _text(self, token: int) -> str:
        anchor, before = self._anchor
        text = self.tokenizer.decode([anchor, token]) if before else self.tokenizer.decode([token])
        piece = text.removeprefix(before)
        return self.tokenizer.id_to_token(token) if not piece or REPLACEMENT in piece else piece

    @cached_property
    def _anchor(self) -> tuple[int, str]:
        """A token that is decoded before others, as some tokenizers drop the first space of a text."""
        for token in self.tokenizer.encode("a")[:1]:
            return token, self.tokenizer.decode([token])
        return 0, ""

    @cached_property
    def _byte_letters(self) -> dict[str, int]:
        """The letters that stand for bytes in byte-level vocabularies (GPT-2); empty for other vocabularies."""
        if not any(token.startswith("Ġ") for token in self.tokenizer.vocabulary):
            return {}
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in shown]
        return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
