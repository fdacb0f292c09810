"""Stop strings: generation ends where one appears in the text, wherever the token boundaries are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tokenizers.decoders import DecodeStream

from clearhead.text import Tokenizer


class StopStrings:
    """A set of stop strings; the output ends before the first of them."""

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer):
        if not all(strings):
            raise ValueError("a stop string is empty; it would end every text before it begins")
        self.strings, self.tokenizer = list(strings), tokenizer

    def find(self, text: str) -> int | None:
        """Return where the first stop string begins, or None.

        The one that is complete first counts, even if another begins earlier: generation ends there. Of several that
        end at the same character, the longest counts.
        """
        matches = [(begin + len(string), begin) for string in self.strings if (begin := text.find(string)) >= 0]
        return min(matches)[1] if matches else None

    def truncate(self, text: str) -> str:
        """Return the text before the first stop string."""
        return text[: self.find(text)]

    def truncate_stream(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield the pieces of a text up to the first stop string, and read no further.

        Text that may be the beginning of a stop string is held back until that is decided.
        """
        pending = ""
        for piece in pieces:
            pending += piece
            stop = self.find(pending)
            if stop is not None:
                if stop:
                    yield pending[:stop]
                return
            partial = self.partial_match(pending)
            if len(pending) > partial:
                yield pending[: len(pending) - partial]
                pending = pending[len(pending) - partial :]
        if pending:
            yield pending

    def partial_match(self, text: str) -> int:
        """Return how many characters at the end of a text may be the beginning of a stop string."""
        max_length = max((len(string) - 1 for string in self.strings), default=0)
        lengths = range(min(max_length, len(text)), 0, -1)
        return next((n for n in lengths if any(string.startswith(text[-n:]) for string in self.strings)), 0)

    def detokenizer(self) -> IncrementalDetokenizer:
        """Return a detokenizer for one row."""
        return IncrementalDetokenizer(self)


class IncrementalDetokenizer:
    """Decode the tokens of one row as they arrive, up to the first stop string.

    `text` is final: it ends before text that may be the beginning of a stop string. `stopped` is the number of tokens
    that completed a stop string, or None.
    """

    def __init__(self, stop_strings: StopStrings):
        self.stop_strings, self.stream = stop_strings, DecodeStream(skip_special_tokens=True)
        self.ids: list[int] = []
        self.decoded = self.text = ""
        self.stopped: int | None = None

    def add(self, token: int) -> bool:
        """Add a token; return whether a stop string is complete."""
        if self.stopped is None:
            self.ids.append(token)
            self._add_text(self.stop_strings.tokenizer.decode_next(self.stream, token))
        return self.stopped is not None

    def finish(self) -> None:
        """Release the text that was held back, and bytes that never became a character."""
        if self.stopped is None:
            full = self.stop_strings.tokenizer.decode(self.ids)
            self._add_text(full[len(self.decoded) :] if full.startswith(self.decoded) else "")
        if self.stopped is None:
            self.text = self.decoded

    def _add_text(self, piece: str) -> None:
        final = len(self.text)
        self.decoded += piece
        stop = self.stop_strings.find(self.decoded[final:])
        if stop is not None:
            self.stopped = len(self.ids)
            self.text = self.decoded[: final + stop]
        else:
            partial = self.stop_strings.partial_match(self.decoded[final:])
            self.text = self.decoded[: len(self.decoded) - partial]
