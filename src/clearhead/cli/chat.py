"""`clearhead chat`: chat with a model in a terminal, or through a pipe with one turn per line."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import interrupt
from clearhead.cli.options import Device, Dtype, ModelName
from clearhead.cli.output import echo
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.predict import Chat

DEFAULT_TEMPERATURE, DEFAULT_TOP_P = 0.8, 0.95
SAMPLING_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
HELP = """/reset          clear the conversation
/system TEXT    set the system prompt; without TEXT, remove it
/quit           exit (as Ctrl-D does); Ctrl-C stops an answer
/help           show this help"""


def chat(
    model: ModelName,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Annotated[
        float | None, typer.Option(min=0, max=100, help="0 is greedy. Default: the model's, else 0.8.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            max=1,
            help="Sample from the smallest set of tokens whose cumulative probability reaches p. "
            "Default: the model's, else 0.95.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 20, help="Maximum tokens per answer. Default: 200, or half the context."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Chat with a model, using its chat template if it has one. When the context is full, the oldest turns are dropped.

    Example: clearhead chat smollm2 --dtype int8
    Example: clearhead chat novels-gpt --system "Two friends are talking in a garden."
    """
    from clearhead.files import read_lines
    from clearhead.predict import Chat, load
    from clearhead.predict.requests import sampling_defaults

    loaded = load(model, device, dtype)
    options = chat_options(sampling_defaults(loaded), temperature, top_p)
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    conversation = Chat(loaded, system=system, seed=seed, **options)
    if not _interactive():
        _converse(conversation, read_lines(Path("-")))
        return
    import readline  # noqa: F401 (line editing and history)

    echo("/help lists the commands; /quit or Ctrl-D exits", err=True)
    while not _converse_typed(conversation):
        pass


def chat_options(defaults: dict[str, Any], temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Return the sampling options: as given, else those of the model, else ours; without sampling, none but 0."""
    if temperature is None:
        temperature = defaults.get("temperature", DEFAULT_TEMPERATURE)
    if not temperature:
        return {"temperature": 0.0} | {key: off for key, off in SAMPLING_OFF.items() if key in defaults}
    return {"temperature": temperature, "top_p": defaults.get("top_p", DEFAULT_TOP_P) if top_p is None else top_p}


def _converse_typed(conversation: "Chat") -> bool:
    """Answer typed lines; return False if Ctrl-C stopped an answer."""
    try:
        try:
            _converse(conversation, _typed_lines())
            return True
        except KeyboardInterrupt:  # anywhere in an answer
            interrupt.handled()
            echo(" …")
    except KeyboardInterrupt:  # pressed again
        interrupt.handled()
    return False


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _typed_lines() -> Iterator[str]:
    """Lines typed at the prompt."""
    while True:
        try:
            yield input("You: ")
        except EOFError:
            echo()
            return
        except UnicodeDecodeError:
            echo("(not valid UTF-8)", err=True)
        except KeyboardInterrupt:
            interrupt.handled()
            echo("\n/quit or Ctrl-D exits", err=True)


def _converse(conversation: "Chat", lines: Iterator[str]) -> None:
    """Answer lines until they end or one is /quit."""
    for line in lines:
        command, _, argument = line.strip().partition(" ")
        if command == "/quit":
            return
        if command.startswith("/"):
            _run_command(conversation, command, argument.strip())
        elif line.strip():
            _answer(conversation, line.strip())


def _run_command(conversation: "Chat", command: str, argument: str) -> None:
    if command == "/reset":
        conversation.reset()
        echo("(conversation cleared)", err=True)
    elif command == "/system":
        conversation.system = argument
        echo("(system prompt set)" if argument else "(system prompt removed)", err=True)
    else:
        echo(HELP if command == "/help" else f"unknown command {command}\n{HELP}", err=True)


def _answer(conversation: "Chat", message: str) -> None:
    """Stream the answer to a message; at a terminal, an error does not end the conversation."""
    try:
        dropped, pieces = conversation.say(message)
    except UserError as error:
        if not _interactive():
            raise
        echo(f"({error})", err=True)
        return
    if dropped:
        turns = "turn" if dropped == 1 else f"{dropped} turns"
        positions = conversation.model.config.max_positions
        echo(f"(dropped the oldest {turns}: the context is {positions} tokens)", err=True)
    if _interactive():
        echo("Model: ", end="")
    for piece in pieces:
        echo(piece, end="")
    echo()
