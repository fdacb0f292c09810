"""The `clearhead` command line. Nothing here imports torch before a command needs it."""

import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from clearhead import __version__
from clearhead.cli import (
    chat,
    data,
    demo,
    embed,
    encoder_tasks,
    evaluate,
    explore,
    generate,
    import_export,
    info,
    interrupt,
    lab,
    new,
    presets,
    serve,
    tokenizer,
    train,
    translate,
    word2vec,
)
from clearhead.cli.language import language, localized
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
        "embed": embed.embed,
        "similar": embed.similar,
    },
    "Serve": {"serve": serve.serve},
    "Tools": {"explore": explore.explore, "demo": demo.demo},
}
for panel, commands in PANELS.items():
    for name, function in commands.items():
        app.command(name, rich_help_panel=panel)(function)
app.add_typer(tokenizer.app, name="tokenizer", rich_help_panel="Tokenizers and word vectors")
app.add_typer(word2vec.app, name="word2vec", rich_help_panel="Tokenizers and word vectors")
app.add_typer(lab.app, name="lab", rich_help_panel="Tools")

NEAR = 0.75  # similarity of an option worth suggesting; with typer's 0.6, --model suggests --help
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


def main(ends_process: bool = False) -> None:
    """Run the command line: a user error is one line on stderr and exit code 2; a closed pipe is not an error."""
    prepare_streams()
    interrupt.install()
    try:
        sys.exit(_run())
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OutputError as error:
        if not isinstance(error.__cause__, BrokenPipeError):
            _exit_with_os_error(error.__cause__)
    except Exception as error:
        if interrupt.received:  # in a library that turned it into another error
            sys.exit(130)
        if isinstance(error, UserError):
            _exit_with_error(str(error))
        if isinstance(error, ClickException):
            _exit_with_usage_error(error)
        if isinstance(error, OSError):
            if error.filename is None:  # help, which typer prints
                discard(sys.stdout)
            _exit_with_os_error(error)
        raise
    finally:
        interrupt.ending = ends_process  # not by a call, which Ctrl-C could interrupt
        if not ends_process:
            interrupt.restore()


def _run() -> int:
    """Run the command and flush; rich has ended it where the reader of the help has left."""
    try:
        code = (app if language() == "en" else _translated_app())(standalone_mode=False)
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        code = 0
    flush()
    return code if isinstance(code, int) else 0


def _translated_app() -> Any:
    from typer.main import get_command

    from clearhead.cli.localize import localize

    command = get_command(app)
    localize(command)
    return command


def _exit_with_usage_error(error: Any) -> None:
    context = getattr(error, "ctx", None)
    if context is not None and hasattr(error, "possibilities"):
        error.possibilities = _near_options(error.option_name, context.command)
    message = localized(error.format_message()) + _given_value(error)
    command = "" if context is None else context.command_path.removeprefix(context.find_root().info_name or "")
    end = "" if message.endswith(("?", ".", "？", "。")) else "." if language() == "en" else "。"
    # the message is empty when help was shown because the command is missing
    _exit_with_error(f"{message}{end} See clearhead{command} --help" if message else "")


def _given_value(error: Any) -> str:
    """Return what was given in place of a number or a choice, which typer's message leaves out."""
    reasons = getattr(error.__cause__, "errors", None)
    return f"{': ' if language() == 'en' else '：'}{reasons()[0]['input']!r:.60}" if reasons else ""


def _near_options(name: str, command: Any) -> list[str]:
    """The options of a command that a user can have meant: beginning alike, or spelled nearly so."""
    known = [option for each in command.params for option in each.opts if option.startswith("--")]
    begin = [option for option in known if len(name) > len("--x") and option.startswith(name)]
    return list(dict.fromkeys([*begin, *get_close_matches(name, known, cutoff=NEAR)]))


def _exit_with_os_error(error: BaseException | None) -> None:
    assert isinstance(error, OSError)
    what = "write the output" if error.filename is None else f"use {error.filename}"
    _exit_with_error(f"cannot {what} ({error.strerror}); free some space, or choose another place")


def _exit_with_error(message: str) -> None:
    for line in message.split("\n") if message else ():
        echo(f"clearhead: {line}", err=True)
    sys.exit(2)
