"""Strings to ids and back: one object for every kind of tokenizer, stored as one tokenizer.json."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from clearhead.errors import UserError
from clearhead.files import read_text, write_text
from clearhead.text.roles import Role, roles_in

# How byte-level vocabularies write ASCII's letters and digits, and the bytes from 128 on, of which all others are made.
LETTERS_AS_BYTES = frozenset(string.ascii_letters + string.digits) | frozenset(
    map(chr, [*range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x122, 0x144)])
)
LARGEST = 1 << 28  # bytes of a tokenizer.json that is read at all


class Tokenizer:
    """Text to ids and ids to text. What looks like a special token inside a text is text, unless asked otherwise."""

    def __init__(self, engine: tokenizers.Tokenizer):
        engine.no_padding()
        engine.no_truncation()
        self.engine = engine
        self.vocabulary: dict[str, int] = engine.get_vocab(with_added_tokens=True)
        self.roles: dict[Role, int] = roles_in(self.vocabulary)

    def __len__(self) -> int:
        """One more than the largest id: the rows that an embedding needs."""
        return max(self.vocabulary.values(), default=-1) + 1

    def id(self, role: Role) -> int:
        """The id of a special token."""
        if role not in self.roles:
            has = ", ".join(self.roles) or "none"
            raise UserError(f"this tokenizer has no {role} token (it has: {has}); train it with that role")
        return self.roles[role]

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """The ids of a text; with `specials`, special tokens written in it count as such."""
        return self.encode_batch([text], specials)[0]

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        self.engine.encode_special_tokens = not specials
        try:
            return [found.ids for found in self.engine.encode_batch_fast(texts, add_special_tokens=False)]
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_text(texts) or error from None

    def offsets(self, text: str) -> list[tuple[int, int, int]]:
        """Every token of a text as (id, first character, character behind the last)."""
        return self.offsets_batch([text])[0]

    def offsets_batch(self, texts: Sequence[str]) -> list[list[tuple[int, int, int]]]:
        """`offsets` of many texts, on all cores."""
        self.engine.encode_special_tokens = True
        try:
            rows = self.engine.encode_batch(texts, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_text(texts) or error from None
        return [[(token, *span) for token, span in zip(row.ids, _spans(row), strict=True)] for row in rows]

    def continues(self) -> list[bool]:
        """For every id, whether it goes on with the word of the token before it (BERT's ##, or no space in front)."""
        pieces = isinstance(self.engine.model, tokenizers.models.WordPiece)
        bytewise = any(token.startswith("Ġ") for token in self.vocabulary)
        spaced = bytewise or any(token.startswith("▁") for token in self.vocabulary) or " " in self.vocabulary
        found = [False] * len(self)
        for token, number in self.vocabulary.items():
            if number in self.roles.values():
                continue
            if pieces:
                found[number] = token.startswith("##")
            elif spaced:
                found[number] = token[:1] in LETTERS_AS_BYTES if bytewise else token[:1].isalnum()
        return found

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """The text of ids; special tokens are left out, or shown with `specials`."""
        return self.decode_batch([list(ids)], specials)[0]

    def decode_batch(self, rows: Sequence[Sequence[int]], specials: bool = False) -> list[str]:
        """The texts of many rows of ids."""
        size = len(self)
        for ids in rows:
            for number in ids:
                if not 0 <= number < size:
                    raise UserError(f"{number} is no token of this tokenizer; ids go from 0 to {size - 1}")
        return self.engine.decode_batch([list(ids) for ids in rows], skip_special_tokens=not specials)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids as they come, in pieces that never end inside a character; joined, it is `decode`."""
        stream, given, sent = DecodeStream(skip_special_tokens=True), [], ""
        for number in ids:
            given.append(number)
            piece = stream.step(self.engine, number)
            if piece:
                sent += piece
                yield piece
        rest = self.decode(given)
        if rest.startswith(sent) and len(rest) > len(sent):  # bytes that never became a character
            yield rest[len(sent) :]

    def token(self, number: int) -> str:
        """How the vocabulary writes an id."""
        found = self.engine.id_to_token(number)
        if found is None:
            raise UserError(f"{number} is no token of this tokenizer; ids go from 0 to {len(self) - 1}")
        return found

    def save(self, path: Path) -> None:
        """Write tokenizer.json, whole or not at all; `path` is the file or its folder."""
        write_text(_file(path), self.engine.to_str(pretty=False))

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a tokenizer.json; `path` is the file or its folder."""
        file = _file(path)
        text = read_text(file, LARGEST)
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the engine raises plain Exception for anything it does not understand
            raise UserError(f"{file} is no tokenizer that this version reads ({error})") from None


def _spans(row: tokenizers.Encoding) -> list[tuple[int, int]]:
    """The characters of every token; the space that some kinds put before a text stands for none of it."""
    spans: list[tuple[int, int]] = row.offsets
    if len(spans) > 1 and row.tokens[0] == "▁" and spans[0][0] == spans[1][0]:
        spans[0] = (0, 0)
    return spans


def _file(path: Path) -> Path:
    """A file ends in .json; any other name is a folder's."""
    if path.suffix == ".json" and not path.is_dir():
        return path
    if path.is_file():
        raise UserError(f"{path} is a file; give a folder, or a file that ends in .json")
    return path / "tokenizer.json"


def _not_text(texts: Sequence[str]) -> UserError | None:
    """Which of the texts is none, and where."""
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            return UserError(f"text {row + 1} is {type(text).__name__}, not a string")
        for place, character in enumerate(text):
            if "\ud800" <= character <= "\udfff":
                return UserError(
                    f"text {row + 1}, character {place + 1}: half of a surrogate pair (U+{ord(character):04X}) is no "
                    "character; read the file as UTF-8, or replace it"
                )
    return None
