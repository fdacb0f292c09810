"""`clearhead chat`: talk with a model at the terminal, or through a pipe, a line a turn."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.generate import Device, Dtype, ModelName
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.predict import Chat

HELP = """/reset          forget what was said
/system TEXT    let this stand before the conversation; without TEXT, nothing
/quit           end (as Ctrl-D does); Ctrl-C stops an answer
/help           this"""


def chat(
    model: ModelName,
    system: Annotated[str, typer.Option(help="What stands before the conversation.")] = "",
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 is greedy.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Only the best words with this share.")] = 0.95,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Tokens of an answer. [default: 200, or half the context]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed and the same words get the same answers.")] = 0,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Talk with a model: it sees what was said before, as far as its context reaches, in the form it was taught.

    Example: clearhead chat smollm2 --dtype int8
    Example: clearhead chat novels-gpt --system "A talk between two friends in a garden."
    """
    from clearhead.predict import Chat, load

    options: dict[str, Any] = {"temperature": temperature} | ({"top_p": top_p} if temperature else {})
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    talk = Chat(load(model, device, dtype), system=system, seed=seed, **options)
    for line in _lines():
        command, _, rest = line.strip().partition(" ")
        if command == "/quit":
            return
        try:
            if command.startswith("/"):
                _obey(talk, command, rest.strip())
            elif line.strip():
                _answer(talk, line.strip())
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            typer.echo(" …")


def _lines() -> Iterator[str]:
    """What is typed, or the lines of a pipe."""
    from clearhead.files import read_lines

    if sys.stdin is None or not sys.stdin.isatty():
        yield from read_lines(Path("-"))
        return
    import readline  # noqa: F401 (arrow keys and history at the prompt)

    typer.echo("/help shows what can be said beside words; /quit or Ctrl-D ends", err=True)
    while True:
        try:
            yield input("You: ")
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo("\n/quit or Ctrl-D ends", err=True)


def _obey(talk: "Chat", command: str, text: str) -> None:
    if command == "/reset":
        talk.reset()
        typer.echo("(forgotten)", err=True)
    elif command == "/system":
        talk.system = text
        typer.echo("(from the next answer on)" if text else "(nothing stands before the conversation now)", err=True)
    else:
        typer.echo(HELP if command == "/help" else f"no command {command}\n{HELP}", err=True)


def _answer(talk: "Chat", said: str) -> None:
    """Show the answer as it comes; what goes wrong is said, and the conversation goes on."""
    try:
        forgotten, pieces = talk.say(said)
    except UserError as error:
        if not sys.stdin.isatty():
            raise
        typer.echo(f"({error})", err=True)
        return
    if forgotten:
        turns = "1 turn" if forgotten == 1 else f"{forgotten} turns"
        positions = talk.model.config.max_positions
        typer.echo(f"(the oldest {turns} no longer fit into the context of {positions} tokens: forgotten)", err=True)
    if sys.stdin.isatty():
        typer.echo("Model: ", nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
