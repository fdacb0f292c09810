"""The `clearhead` command line. Nothing here imports torch before a command needs it."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated

import typer

from clearhead import __version__
from clearhead.cli import (
    chat,
    demo,
    encoder_tasks,
    evaluate,
    generate,
    import_export,
    info,
    presets,
    tokenizer,
    train,
    translate,
    word2vec,
)
from clearhead.cli.output import OutputError, discard, echo, flush, prepare_streams
from clearhead.errors import UserError

app = typer.Typer(
    name="clearhead",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Models": {
        "models": info.models,
        "info": info.info,
        "presets": presets.presets,
        "pull": import_export.pull,
        "import": import_export.import_,
        "export": import_export.export,
    },
    "Train": {"recipes": train.recipes, "train": train.train, "evaluate": evaluate.evaluate},
    "Generate": {"translate": translate.translate, "generate": generate.generate, "chat": chat.chat},
    "Encoders": {
        "fill": encoder_tasks.fill,
        "classify": encoder_tasks.classify,
        "tag": encoder_tasks.tag,
        "answer": encoder_tasks.answer,
        "embed": encoder_tasks.embed,
        "similar": encoder_tasks.similar,
    },
    "Tools": {"demo": demo.demo},
}
for panel, commands in PANELS.items():
    for name, function in commands.items():
        app.command(name, rich_help_panel=panel)(function)
app.add_typer(tokenizer.app, name="tokenizer", rich_help_panel="Tokenizers and word vectors")
app.add_typer(word2vec.app, name="word2vec", rich_help_panel="Tokenizers and word vectors")

ClickException: type[Exception] = typer.BadParameter.__mro__[2]  # typer may vendor click


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """The Transformer: translator, BERT, GPT and Llama in one small, fast package."""
    if version:
        echo(f"clearhead {__version__}")
    elif context.invoked_subcommand is None:
        echo(context.get_help())


def main() -> None:
    """Run the command line: a user error is one line on stderr and exit code 2; a closed pipe is not an error."""
    prepare_streams()
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, _interrupt)
    try:
        sys.exit(_run())
    except UserError as error:
        _exit_with_error(str(error))
    except ClickException as error:
        message: str = error.format_message()  # type: ignore[attr-defined]
        context = getattr(error, "ctx", None)
        command = "" if context is None else context.command_path.removeprefix(context.find_root().info_name or "")
        end = "" if message.endswith(("?", ".")) else "."
        # the message is empty when help was shown because the command is missing
        _exit_with_error(f"{message}{end} See clearhead{command} --help" if message else "")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OutputError as error:
        if not isinstance(error.__cause__, BrokenPipeError):
            _exit_with_os_error(error.__cause__)
    except OSError as error:
        if error.filename is None:  # help, which typer prints
            discard(sys.stdout)
        _exit_with_os_error(error)
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python prints a traceback for Ctrl-C while it shuts down


def _run() -> int:
    """Run the command and flush; rich has ended it where the reader of the help has left."""
    try:
        code = app(standalone_mode=False)
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        code = 0
    flush()
    return code if isinstance(code, int) else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once while torch is being imported, which can swallow the exception."""
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        os._exit(130)  # nothing has been read or written yet
    raise KeyboardInterrupt


def _exit_with_os_error(error: BaseException | None) -> None:
    assert isinstance(error, OSError)
    what = "write the output" if error.filename is None else f"use {error.filename}"
    _exit_with_error(f"cannot {what} ({error.strerror}); free some space, or choose another place")


def _exit_with_error(message: str) -> None:
    for line in message.splitlines():
        echo(f"clearhead: {line}", err=True)
    sys.exit(2)
