"""Tokenizer: encode and decode text, for every kind of tokenizer, stored as tokenizer.json."""

from __future__ import annotations

import contextlib
import json
import string
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from clearhead.errors import UserError
from clearhead.files import read_text, write_text
from clearhead.limits import MAX_JSON_BYTES
from clearhead.text import tokenizer_limits as limits
from clearhead.text.engine_errors import engine_errors, quiet_stderr, try_out, try_steps
from clearhead.text.roles import Role, find_roles

# Byte-level spellings of ASCII letters and digits, and of the bytes ≥ 128 that all other letters consist of.
BYTE_LEVEL_LETTERS = frozenset(string.ascii_letters + string.digits) | frozenset(
    map(chr, [*range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x122, 0x144)])
)
UNASSIGNED = "\U0010fffe"  # in no vocabulary


class Tokenizer:
    """Encode text to ids and decode ids. Special tokens spelled in a text are encoded as plain text by default."""

    def __init__(self, engine: tokenizers.Tokenizer, name: str = "tokenizer"):
        self.name = name  # of its file, for error messages
        with self._errors():
            engine.no_padding()
            engine.no_truncation()
            self.vocabulary: dict[str, int] = engine.get_vocab(with_added_tokens=True)
            added = engine.get_added_tokens_decoder()
        if len(self) > limits.MAX_ID:
            raise UserError(f"{name}: id {len(self) - 1}, but ids range to {limits.MAX_ID - 1}; make it again")
        self.engine = engine
        self.roles: dict[Role, int] = find_roles(self.vocabulary)
        self.special_tokens = {token.content: number for number, token in added.items() if token.special}
        self._lock = threading.Lock()  # for the engine's only mutable setting
        self._spelled: dict[int, list[int]] = {}
        self.marker_ids = frozenset(self._marker_ids())

    def __len__(self) -> int:
        """The vocabulary size: one more than the largest id."""
        return max(self.vocabulary.values(), default=-1) + 1

    @cached_property
    def separators_in_pair(self) -> int:
        """How many end or separator tokens are between two texts: 2 in RoBERTa's post-processor, else 1."""
        processor = self.engine.post_processor
        state = {} if processor is None else json.loads(processor.__getstate__())
        for step in [state, *state.get("processors", ())]:
            if step.get("type") == "RobertaProcessing":
                return 2
            kinds = [next(iter(part), "") for part in step.get("pair", ()) if isinstance(part, dict)]
            if kinds.count("Sequence") == 2:
                first = kinds.index("Sequence")
                return min(2, max(1, kinds.index("Sequence", first + 1) - first - 1))
        return 1

    def id(self, role: Role) -> int:
        """Return the id of the special token with this role."""
        if role not in self.roles:
            known = ", ".join(self.roles) or "none"
            raise UserError(f"the tokenizer has no {role} token (roles: {known}); train it with that role")
        return self.roles[role]

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Encode a text; `special_tokens` encodes special tokens spelled in the text as such."""
        return self.encode_batch([text], special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], special_tokens: bool = False) -> list[list[int]]:
        """Encode many texts in parallel."""
        rows = [row.ids for row in self._encode(texts, special_tokens, self.engine.encode_batch_fast)]
        if special_tokens:
            return rows
        return [row if self.marker_ids.isdisjoint(row) else self._spell(row) for row in rows]

    def offsets(self, text: str) -> list[tuple[int, int, int]]:
        """Encode a text as (id, start, end) tuples with character offsets."""
        return self.offsets_batch([text])[0]

    def offsets_batch(self, texts: Sequence[str]) -> list[list[tuple[int, int, int]]]:
        """Encode many texts with character offsets in parallel."""
        rows = self._encode(texts, False, self.engine.encode_batch)
        return [
            [
                (piece, *span)
                for token_id, span in zip(row.ids, _spans(row), strict=True)
                for piece in (self._spell([token_id]) if token_id in self.marker_ids else [token_id])
            ]
            for row in rows
        ]

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return engine_errors(f"{self.name}: the tokenizer fails")

    def _encode(self, texts: Sequence[str], special_tokens: bool, encode: Any) -> list[tokenizers.Encoding]:
        """Call one of the engine's methods for batches; a text that is not a valid string is named."""
        with self._errors(), self._lock:  # else another thread's setting could be used
            self.engine.encode_special_tokens = not special_tokens
            try:
                rows: list[tokenizers.Encoding] = encode(texts, add_special_tokens=False)
            except (UnicodeEncodeError, TypeError) as error:
                raise _invalid_text(texts) or error from None
        return rows

    def _marker_ids(self) -> set[int]:
        """Return the ids of special tokens that plain text never has: not the unknown token, nor single letters."""
        unknown = {self.roles.get("unknown")}
        with contextlib.suppress(UserError):  # a vocabulary without an unknown token
            unknown.update(self._encode([UNASSIGNED], False, self.engine.encode_batch_fast)[0].ids)
        return {number for content, number in self.special_tokens.items() if len(content) > 1} - unknown

    def _spell(self, row: Sequence[int]) -> list[int]:
        """Replace special tokens by their letters: a vocabulary such as Unigram's may find them in plain text."""
        return [piece for token_id in row for piece in self._letters(token_id)]

    def _letters(self, token_id: int) -> list[int]:
        if token_id not in self.marker_ids:
            return [token_id]
        if token_id not in self._spelled:
            letters = self._encode([*self.id_to_token(token_id)], False, self.engine.encode_batch_fast)
            self._spelled[token_id] = [each for row in letters for each in row.ids if each not in self.marker_ids]
        return self._spelled[token_id]

    def continuation_flags(self) -> list[bool]:
        """Return for every id whether it continues the previous word (BERT's ##, or no leading space)."""
        wordpiece = isinstance(self.engine.model, tokenizers.models.WordPiece)
        byte_level = any(token.startswith("Ġ") for token in self.vocabulary)
        has_spaces = byte_level or any(token.startswith("▁") for token in self.vocabulary) or " " in self.vocabulary
        continues = [False] * len(self)
        for token, token_id in self.vocabulary.items():
            if token_id in self.roles.values():
                continue
            if wordpiece:
                continues[token_id] = token.startswith("##")
            elif has_spaces:
                continues[token_id] = token[:1] in BYTE_LEVEL_LETTERS if byte_level else token[:1].isalnum()
        return continues

    def decode(self, ids: Iterable[int], special_tokens: bool = False) -> str:
        """Decode ids; special tokens are skipped unless `special_tokens`."""
        return self.decode_batch([list(ids)], special_tokens)[0]

    def decode_batch(self, rows: Sequence[Sequence[int]], special_tokens: bool = False) -> list[str]:
        """Decode many rows of ids in parallel."""
        size = len(self)
        for ids in rows:
            for token_id in ids:
                if not 0 <= token_id < size:
                    raise UserError(f"id {token_id} is not in the vocabulary; ids range from 0 to {size - 1}")
        with self._errors():
            return self.engine.decode_batch([list(ids) for ids in rows], skip_special_tokens=not special_tokens)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Decode ids incrementally, in pieces that never split a character; concatenated, they equal `decode`."""
        stream, consumed, emitted = DecodeStream(skip_special_tokens=True), [], ""
        for token_id in ids:
            consumed.append(token_id)
            if piece := self.decode_next(stream, token_id):
                emitted += piece
                yield piece
        text = self.decode(consumed)
        if text.startswith(emitted) and len(text) > len(emitted):  # an incomplete character at the end
            yield text[len(emitted) :]

    def decode_next(self, stream: DecodeStream, token_id: int) -> str:
        """Add an id to a stream of the engine; return the text that it completes."""
        with self._errors():
            return stream.step(self.engine, token_id) or ""

    def id_to_token(self, token_id: int) -> str:
        """Return the vocabulary entry of an id."""
        with self._errors():
            token = self.engine.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise UserError(f"id {token_id} is not in the vocabulary; ids range from 0 to {len(self) - 1}")
        return token

    def save(self, path: Path) -> None:
        """Write tokenizer.json atomically; `path` is the file or its folder."""
        with self._errors():
            text = self.engine.to_str(pretty=False)
        write_text(_file(path), text)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load tokenizer.json; `path` is the file or its folder."""
        file = _file(path)
        return cls.from_json(read_text(file, MAX_JSON_BYTES), str(file))

    @classmethod
    def from_json(cls, text: str, name: str) -> Tokenizer:
        """Make a tokenizer of the text of a tokenizer.json, after checks that it ends and does not crash."""
        try:
            settings = limits.check(text)
        except ValueError as error:
            raise UserError(f"{name}: not a supported tokenizer.json ({error}); download or train it again") from None
        with quiet_stderr(), engine_errors(f"{name}: not a supported tokenizer.json"):
            try_steps(settings)
            engine = tokenizers.Tokenizer.from_str(text)
            tokenizer = cls(engine, name)
            try_out(engine, tokenizer.vocabulary)
        return tokenizer


def _spans(row: tokenizers.Encoding) -> list[tuple[int, int]]:
    """Return the character spans of the tokens; a ▁ prepended to the text has an empty span."""
    spans: list[tuple[int, int]] = row.offsets
    if len(spans) > 1 and row.tokens[0] == "▁" and spans[0][0] == spans[1][0]:
        spans[0] = (0, 0)
    return spans


def _file(path: Path) -> Path:
    """Return the file itself if it ends in .json, else tokenizer.json in the folder."""
    if path.suffix == ".json" and not path.is_dir():
        return path
    if path.is_file():
        raise UserError(f"{path} is a file; give a folder, or a .json file")
    return path / "tokenizer.json"


def _invalid_text(texts: Sequence[str]) -> UserError | None:
    """Return the error for the first text that is not a valid string."""
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            return UserError(f"text {row + 1} is {type(text).__name__}, not a string; give strings")
        for index, character in enumerate(text):
            if "\ud800" <= character <= "\udfff":
                return UserError(
                    f"text {row + 1}, character {index + 1}: lone surrogate (U+{ord(character):04X}); "
                    "read the file as UTF-8, or remove it"
                )
    return None
