"""Translate the help of the commands, which typer and its parser write in English."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from clearhead.cli.catalog import CONTEXT
from clearhead.cli.language import localized

EXAMPLE = "Example: "
# What typer writes into help: the titles and notes of rich_utils, and the option --help.
TITLES = (
    "ARGUMENTS_PANEL_TITLE",
    "OPTIONS_PANEL_TITLE",
    "COMMANDS_PANEL_TITLE",
    "DEFAULT_STRING",
    "REQUIRED_LONG_STRING",
)
# What the parser writes into errors, with its template's own names.
PARSER_MESSAGES = (
    "Usage",
    "Arguments",
    "Options",
    "Commands",
    "[default: {default}]",
    "[required]",
    "Show this message and exit.",
    "No such command {name}.",
    "No such command {name}. Did you mean {suggestion}?",
    "No such option: {name}",
    "No such option: {name} Did you mean {suggestion}?",
    "No such option: {name} (Possible options: {options})",
    "Missing argument {name}.",
    "Missing option {name}.",
    "Missing command.",
    "Got unexpected extra argument(s) ({arguments})",
    "Option {name} requires an argument.",
    "Option {name} requires {count} arguments.",
    "Option {name} does not take a value.",
    "Invalid value for {name}: {problem}",
    "Input should be greater than or equal to {limit}",
    "Input should be less than or equal to {limit}",
    "Input should be a valid integer, unable to parse string as an integer",
    "Input should be a valid number, unable to parse string as a number",
    "Input should be {values}",
    "warning: {message}",
    "Next",
    # what messages put together from words
    "a decoder",
    "an encoder",
    "an encoder-decoder",
    *(f"{name}{CONTEXT}{word}" for name in ("unit", "units") for word in ("line", "lines", "text", "texts")),
    f"separator{CONTEXT}commas",
    f"separator{CONTEXT}tabs",
    "{count} days",
    "{count} hours",
    "{count} minutes",
    # of the operating system
    "No such file or directory",
    "Permission denied",
    "No space left on device",
    "Is a directory",
    "Not a directory",
    "File exists",
    "Read-only file system",
    "File name too long",
    "Broken pipe",
    "Input/output error",
)


def localize(command: Any) -> None:
    """Translate the help of a command and its subcommands when it is printed."""
    command.format_help = _with_translated_help(command, command.format_help)
    for each in getattr(command, "commands", {}).values():
        localize(each)


def _with_translated_help(command: Any, original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def format_help(context: Any, formatter: Any) -> None:
        from typer import rich_utils

        for title in TITLES:
            text = getattr(rich_utils, title).replace("{}", "{default}")
            setattr(rich_utils, title, localized(text).replace("{default}", "{}"))
        rich_utils._make_rich_text = _folding(rich_utils._make_rich_text)
        usage = command.get_usage(context).replace("Usage: ", localized("Usage: "), 1)
        command.get_usage = lambda context: usage
        for each in (command, *getattr(command, "commands", {}).values()):
            each.help = translate_help(each.help or "")
            each.rich_help_panel = localized(getattr(each, "rich_help_panel", None) or "") or None
        for parameter in command.get_params(context):
            parameter.help = localized(getattr(parameter, "help", None) or "")
        original(context, formatter)

    return format_help


def _folding(make_text: Callable[..., Any]) -> Callable[..., Any]:
    """Break long lines anywhere: Chinese has no spaces."""

    def make_folding_text(**options: Any) -> Any:
        text = make_text(**options)
        text.overflow = "fold"
        return text

    return make_folding_text


def translate_help(text: str) -> str:
    """Translate the paragraphs of a help text; examples stay."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(translate_paragraph(paragraph) for paragraph in paragraphs)


def translate_paragraph(text: str) -> str:
    """Translate one paragraph; an example keeps its command."""
    if text.startswith(EXAMPLE):
        return text.replace(EXAMPLE, localized(EXAMPLE))
    return localized(" ".join(text.split("\n")))


def help_messages() -> list[str]:
    """Return every text of the help and of the parser, as the catalog has them."""
    from typer.main import get_command

    from clearhead.cli import app

    return [*_help_messages(get_command(app)), EXAMPLE.strip(" :"), *PARSER_MESSAGES]


def _help_messages(command: Any) -> Iterator[str]:
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph and not paragraph.startswith(EXAMPLE):
            yield " ".join(paragraph.split("\n"))
    if panel := getattr(command, "rich_help_panel", None):
        yield panel
    yield from filter(None, (getattr(parameter, "help", None) for parameter in command.params))
    for each in getattr(command, "commands", {}).values():
        yield from _help_messages(each)
