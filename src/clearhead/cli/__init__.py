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
    data,
    demo,
    encoder_tasks,
    evaluate,
    generate,
    import_export,
    info,
    new,
    presets,
    tokenizer,
    train,
    translate,
    word2vec,
)
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
    "Train": {
        "recipes": train.recipes,
        "new": new.new,
        "data": data.data,
        "train": train.train,
        "evaluate": evaluate.evaluate,
    },
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
        typer.echo(f"clearhead {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line: a user error is one line on stderr and exit code 2; a closed pipe is not an error."""
    for stream in (sys.stdout, sys.stderr):  # print ? for characters that the terminal cannot encode
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
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        _discard_stdout()
    except BrokenPipeError:
        _discard_stdout()
    except OSError as error:
        _discard_stdout()
        _exit_with_error(f"cannot write the output ({error.strerror}); free some space or redirect it elsewhere")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once while torch is being imported, which can swallow the exception."""
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        os._exit(130)  # nothing has been read or written yet
    raise KeyboardInterrupt


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, so that the final flush does not fail."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_with_error(message: str) -> None:
    for line in message.splitlines():
        print(f"clearhead: {line}", file=sys.stderr)
    sys.exit(2)
