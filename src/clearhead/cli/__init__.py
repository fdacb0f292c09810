"""The command line: one thin file for each group of verbs. Nothing here imports torch before a verb needs it."""

import os
import sys
from typing import Annotated

import typer

from clearhead import __version__
from clearhead.cli import demo, presets
from clearhead.errors import UserError

app = typer.Typer(
    name="clearhead",
    help="The Transformer: translator, BERT, GPT and Llama in one small, fast package.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("presets")(presets.presets)
app.command("demo")(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clearhead {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    pass


def main() -> None:
    """The console script: a user's mistake is one line on stderr and exit code 2; a closed pipe is no error."""
    try:
        app()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"clearhead: {line}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush to
        sys.exit(0)
