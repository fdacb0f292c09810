"""The command line: one thin file for each group of verbs. Nothing here imports torch before a verb needs it."""

import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from clearhead import __version__
from clearhead.cli import chat, demo, evaluate, info, presets, tokenizer, train, understand, word2vec
from clearhead.cli import generate as write
from clearhead.cli import import_export as formats
from clearhead.errors import UserError

app = typer.Typer(
    name="clearhead",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("presets")(presets.presets)
app.command("demo")(demo.demo)
app.command("recipes")(train.recipes)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("translate")(write.translate)
app.command("generate")(write.generate)
app.command("chat")(chat.chat)
app.command("models")(info.models)
app.command("info")(info.info)
app.command("import")(formats.import_)
app.command("export")(formats.export)
app.command("pull")(formats.pull)
for verb in (
    understand.fill,
    understand.classify,
    understand.tag,
    understand.answer,
    understand.embed,
    understand.similar,
):
    app.command(verb.__name__)(verb)
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(word2vec.app, name="word2vec")

WrongUse: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, wherever this typer keeps it


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """The Transformer: translator, BERT, GPT and Llama in one small, fast package."""
    if version:
        typer.echo(f"clearhead {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """The console script: a user's mistake is one line on stderr and exit code 2; a closed pipe is no error."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows a ? instead of a traceback
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = app(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as error:
        _complain(str(error))
    except WrongUse as error:
        message: str = error.format_message()  # type: ignore[attr-defined]
        context = getattr(error, "ctx", None)
        verb = "" if context is None else context.command_path.removeprefix(context.find_root().info_name or "")
        end = "" if message.endswith(("?", ".")) else "."
        _complain(f"{message}{end} See clearhead{verb} --help" if message else "")  # without a verb, help was shown
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        _close_output()
    except BrokenPipeError:
        _close_output()
    except OSError as error:
        _close_output()
        _complain(f"cannot write the output ({error.strerror}); nothing more was done")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C, as Python does it, but while torch is being imported, which has been seen to lose the exception."""
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        os._exit(130)  # nothing has been read or written yet
    raise KeyboardInterrupt


def _close_output() -> None:
    """Nothing is left to flush to."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    for line in message.splitlines():
        print(f"clearhead: {line}", file=sys.stderr)
    sys.exit(2)
