"""A conversation with any decoder: what was said stands before the answer, as far as the context reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clearhead.errors import UserError
from clearhead.model import Decoder
from clearhead.predict.model import Model
from clearhead.predict.requests import settings
from clearhead.predict.template import Template, Turn


class Form(Protocol):
    """How a conversation is written down for the model."""

    @property
    def stops(self) -> tuple[str, ...]:
        """What ends an answer beside the model's own end token."""

    def prompt(self, system: str, turns: Sequence[Turn]) -> str | list[int]:
        """The text, or the ids, that the answer to the last turn follows."""


@dataclass(frozen=True)
class Transcript:
    """The form for a model that was never taught one: the transcript of a talk, which any decoder can go on with."""

    person: str = "You"
    model: str = "Model"

    @property
    def stops(self) -> tuple[str, ...]:
        """The next line of either speaker."""
        return f"\n{self.person}:", f"\n{self.model}:"

    def prompt(self, system: str, turns: Sequence[Turn]) -> str:
        """One line for each that speaks; the last one waits for its text."""
        lines = [f"{self.person}: {said}\n{self.model}: {answer}\n" for said, answer in turns[:-1]]
        return (f"{system}\n\n" if system else "") + "".join(lines) + f"{self.person}: {turns[-1].said}\n{self.model}:"


def form_of(model: Model) -> Form:
    """The form that a model was taught: its chat template, else a transcript."""
    template = model.extra.get("chat_template")
    if not isinstance(template, str):
        return Transcript()
    return Template(template, model.tokenizer, model.extra.get("begin", ()), model.extra.get("ends", ()))


class Chat:
    """A conversation: `say` answers in pieces and remembers, `reset` forgets; options are those of GenerationConfig."""

    def __init__(self, model: Model, *, system: str = "", seed: int = 0, form: Form | None = None, **options: Any):
        model._as(Decoder, "chat")
        room = model.config.max_positions
        self.model, self.system, self.seed, self.form = model, system, seed, form or form_of(model)
        self.options = {"max_new_tokens": max(1, min(200, room // 2))} | options
        self.new: int = settings(model, self.options).max_new_tokens
        self.turns: list[Turn] = []
        self.count = 0  # of all that was ever said: each answer draws by a seed of its own

    def reset(self) -> None:
        """Forget what was said."""
        self.turns = []

    def say(self, text: str) -> tuple[int, Iterator[str]]:
        """How many of the oldest turns had to be forgotten to make room, and the answer in pieces.

        An answer that is broken off is remembered as far as it came.
        """
        turns, room = [*self.turns, Turn(text)], self.model.config.max_positions - self.new
        while len(prompt := self._prompt(turns)) > room and len(turns) > 1:
            del turns[0]
        if len(prompt) > room:
            raise UserError(
                f"{len(prompt)} tokens with the system text and {self.new} for the answer are more than the "
                f"model's {self.model.config.max_positions} positions; say it in fewer words, or lower max_new_tokens"
            )
        forgotten = len(self.turns) + 1 - len(turns)
        self.turns, self.count = turns, self.count + 1
        return forgotten, self._answer(turns, prompt)

    def _prompt(self, turns: Sequence[Turn]) -> list[int]:
        found = self.form.prompt(self.system, turns)
        return self.model.prompt_ids(found) if isinstance(found, str) else found

    def _answer(self, turns: list[Turn], prompt: list[int]) -> Iterator[str]:
        answer = ""
        pieces = self.model.stream(prompt, seed=self.seed + self.count, stop=self.form.stops, **self.options)
        try:
            for piece in pieces:
                shown = piece if answer else piece.lstrip()  # the space between the name and the answer
                answer += shown
                if shown:
                    yield shown
        finally:
            turns[-1] = Turn(turns[-1].said, answer.strip())
