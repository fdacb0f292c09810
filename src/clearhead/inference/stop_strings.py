"""Stop strings: text that ends a text when it appears, wherever the borders of tokens lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tokenizers.decoders import DecodeStream

from clearhead.text import Tokenizer


class StopStrings:
    """The strings at which a text ends; they are no part of it."""

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer):
        if not all(strings):
            raise ValueError("a stop string is empty; it would end every text before it begins")
        self.strings, self.tokenizer = list(strings), tokenizer

    def find(self, text: str) -> int | None:
        """Where the one begins that is complete first: what comes later is never written."""
        found = [(place + len(string), place) for string in self.strings if (place := text.find(string)) >= 0]
        return min(found)[1] if found else None

    def truncate(self, text: str) -> str:
        """The text before the first of them."""
        return text[: self.find(text)]

    def watch(self, pieces: Iterable[str]) -> Iterator[str]:
        """The pieces of a text up to the first stop; what may be the beginning of one is held back until it is known.

        Nothing more is asked of `pieces` once a stop has come.
        """
        held = ""
        for piece in pieces:
            held += piece
            stop = self.find(held)
            if stop is not None:
                if stop:
                    yield held[:stop]
                return
            keep = self.begun(held)
            if len(held) > keep:
                yield held[: len(held) - keep]
                held = held[len(held) - keep :]
        if held:
            yield held

    def begun(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop."""
        max_length = max((len(string) - 1 for string in self.strings), default=0)
        sizes = range(min(max_length, len(text)), 0, -1)
        return next((n for n in sizes if any(string.startswith(text[-n:]) for string in self.strings)), 0)

    def watcher(self) -> Watcher:
        """For one row."""
        return Watcher(self)


class Watcher:
    """Reads the tokens of one row as they come; `stopped` is how many there were when a stop was complete.

    `text` is what of the row is sure to stay: what may be the beginning of a stop is held back until it is known.
    """

    def __init__(self, stops: StopStrings):
        self.stops, self.stream = stops, DecodeStream(skip_special_tokens=True)
        self.ids: list[int] = []
        self.seen = self.text = ""
        self.stopped: int | None = None

    def add(self, token: int) -> bool:
        """Whether the row has come to a stop."""
        if self.stopped is None:
            self.ids.append(token)
            self._read(self.stream.step(self.stops.tokenizer.engine, token) or "")
        return self.stopped is not None

    def finish(self) -> None:
        """No token follows: what was held back is text, and so are bytes that never became a character."""
        if self.stopped is None:
            whole = self.stops.tokenizer.decode(self.ids)
            self._read(whole[len(self.seen) :] if whole.startswith(self.seen) else "")
        if self.stopped is None:
            self.text = self.seen

    def _read(self, piece: str) -> None:
        held = len(self.text)
        self.seen += piece
        stop = self.stops.find(self.seen[held:])
        if stop is not None:
            self.stopped = len(self.ids)
            self.text = self.seen[: held + stop]
        else:
            self.text = self.seen[: len(self.seen) - self.stops.begun(self.seen[held:])]
