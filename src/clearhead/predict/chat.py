"""A conversation with a decoder, as far as its context reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clearhead.errors import UserError
from clearhead.model import Decoder
from clearhead.predict.check_arguments import check_number, check_string
from clearhead.predict.model import Model
from clearhead.predict.requests import generation_config, sampling_defaults
from clearhead.predict.template import Template, Turn

MESSAGE = 'write them like {"role": "user", "content": "Hi"}'
ROLES = ("user", "assistant")


class PromptFormat(Protocol):
    """How a conversation is formatted as a prompt."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of an answer, besides the model's end token."""

    def prompt(self, system: str, turns: Sequence[Turn]) -> str | list[int]:
        """The text, or the ids, before the answer to the last turn."""


@dataclass(frozen=True)
class Transcript:
    """The prompt format of a model without a chat template: a transcript, which any decoder can continue."""

    person: str = "You"
    model: str = "Model"

    @property
    def stops(self) -> tuple[str, ...]:
        """The next line of either speaker."""
        return f"\n{self.person}:", f"\n{self.model}:"

    def prompt(self, system: str, turns: Sequence[Turn]) -> str:
        """One line per speaker; the last one is open."""
        lines = [f"{self.person}: {user}\n{self.model}: {assistant}\n" for user, assistant in turns[:-1]]
        return (f"{system}\n\n" if system else "") + "".join(lines) + f"{self.person}: {turns[-1].user}\n{self.model}:"


def prompt_format_of(model: Model) -> PromptFormat:
    """The chat template of a model, or a transcript if it has none."""
    template = model.extra.get("chat_template")
    if not isinstance(template, str):
        return Transcript()
    tokens = model.special_tokens
    begin = tokens.begin if "begin" in model.extra else ()
    return Template(template, model.tokenizer, begin, tokens.eos_ids if "eos_ids" in model.extra else ())


class Chat:
    """A conversation with its history; options are those of GenerationConfig, with a model's own sampling defaults.

    chat = model.chat(system="Be brief.", temperature=0.8)
    print(chat.ask("Hello!"))

    Or continue one: `model.chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}])`.
    """

    def __init__(
        self,
        model: Model,
        messages: Sequence[Mapping[str, str]] = (),
        *,
        system: str = "",
        seed: int = 0,
        prompt_format: PromptFormat | None = None,
        **options: Any,
    ):
        model.check_family(Decoder, "chat")
        check_string("system", system)
        check_number("seed", seed, 0)
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise UserError(f"messages: {type(messages).__name__} is not a list of messages; " + MESSAGE)
        self.model, self.seed, self.prompt_format = model, seed, prompt_format or prompt_format_of(model)
        defaults = {"max_new_tokens": max(1, min(200, model.config.max_positions // 2))} | sampling_defaults(model)
        self.options: dict[str, Any] = defaults | options
        self.max_new_tokens: int = generation_config(model, self.options).max_new_tokens
        self.system, self.turns = read_messages(messages, system)
        self.count = len(self.turns)  # of all turns so far: each answer draws from a seed of its own

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as {"role", "content"} messages."""
        messages = [(role, text) for turn in self.turns for role, text in zip(ROLES, turn, strict=True)]
        system = [("system", self.system)] if self.system else []
        return [{"role": role, "content": text} for role, text in (*system, *messages)]

    def reset(self) -> None:
        """Clear the turns."""
        self.turns = []

    def ask(self, text: str) -> str:
        """Return the answer to a message."""
        return "".join(self.say(text)[1])

    def say(self, text: str) -> tuple[int, Iterator[str]]:
        """Return the number of oldest turns dropped to fit the context, and the answer in pieces.

        An interrupted answer is kept as far as it was generated.
        """
        check_string("message", text)
        turns, room = [*self.turns, Turn(text)], self.model.config.max_positions - self.max_new_tokens
        while len(prompt := self._prompt(turns)) > room and len(turns) > 1:
            del turns[0]
        if len(prompt) > room:
            raise UserError(
                f"{len(prompt)} tokens with the system prompt and {self.max_new_tokens} for the answer are more than "
                f"the model's {self.model.config.max_positions} positions; shorten it, or lower max_new_tokens"
            )
        dropped = len(self.turns) + 1 - len(turns)
        self.turns, self.count = turns, self.count + 1
        return dropped, self._answer(turns, prompt)

    def _prompt(self, turns: Sequence[Turn]) -> list[int]:
        prompt = self.prompt_format.prompt(self.system, turns)
        return self.model.prompt_ids(prompt) if isinstance(prompt, str) else prompt

    def _answer(self, turns: list[Turn], prompt: list[int]) -> Iterator[str]:
        answer = ""
        pieces = self.model.stream(prompt, seed=self.seed + self.count, stop=self.prompt_format.stops, **self.options)
        try:
            for piece in pieces:
                shown = piece if answer else piece.lstrip()  # the space between the speaker's name and the answer
                answer += shown
                if shown:
                    yield shown
        finally:
            turns[-1] = Turn(turns[-1].user, answer.strip())


def read_messages(messages: Sequence[Mapping[str, str]], system: str = "") -> tuple[str, list[Turn]]:
    """The system text and the turns of {"role", "content"} messages: user and assistant in turn, the assistant last."""
    contents: list[str] = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            raise UserError(f"messages.{number}: not a message; write {{'role': 'user', 'content': '…'}}")
        if role == "system" and number == 0 and not system:
            system = content
        elif role == ROLES[len(contents) % 2]:
            contents.append(content)
        else:
            expected = "system first, then user and assistant in turn"
            raise UserError(f"messages.{number}.role: {role!r:.40} is out of order; write {expected}")
    if len(contents) % 2:
        raise UserError("messages: the last one is the user's; pass its content to ask() or say()")
    return system, [Turn(*pair) for pair in zip(contents[::2], contents[1::2], strict=True)]
