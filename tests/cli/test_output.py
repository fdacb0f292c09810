"""The output function: what a terminal and a pipe get, and output that fails."""

import ast
import io
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

import clearhead
from clearhead.cli.output import CheckedStream, OutputError, echo, echo_json, escape, prepare_streams
from tests.cli.forked import calls
from tests.cli.models import make

SOURCES = Path(clearhead.__file__).parent
HOSTILE = "a\x1b]0;t\x07\x1b[2J\r\x7f\x9b31m\u202eb\u2066\udcff\ud83d c\té\n"
SHOWN = "a\\x1b]0;t\\x07\\x1b[2J\\x0d\\x7f\\x9b31m\\u202eb\\u2066\\xff\\ud83d c\té\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("output")
    make(folder / "gpt", "tiny-gpt")
    make(folder / "tr", "tiny-translator")
    make(folder / "runs" / "[red]" / "best", "tiny-translator")
    return folder


def printed(monkeypatch: pytest.MonkeyPatch, write: Callable[[], None], terminal: bool, encoding: str) -> bytes:
    """The bytes that a function prints."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr("clearhead.cli.output._is_terminal", lambda stream: terminal)
    monkeypatch.setattr("clearhead.cli.output._open_closed_descriptors", lambda: None)
    prepare_streams()
    write()
    return stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_escaped_are_control_characters_overrides_and_surrogates() -> None:
    for code in range(0x110000):
        character = chr(code)
        unsafe = unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"
        unsafe |= unicodedata.bidirectional(character) in [
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        ]
        assert (escape(character) != character) == unsafe, hex(code)
        assert escape(character).isprintable() or not unsafe


@pytest.mark.parametrize(
    ("terminal", "encoding", "expected"),
    [
        (True, "utf-8", SHOWN.encode()),
        (True, "ascii", SHOWN.replace("é", "?").encode()),
        (False, "utf-8", HOSTILE.replace("\ud83d", "?").encode(errors="surrogateescape")),
        (False, "ascii", b"a\x1b]0;t\x07\x1b[2J\r\x7f?31m?b?\xff? c\t?\n"),
    ],
)
def test_a_terminal_shows_and_a_pipe_passes_on(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, encoding: str, expected: bytes
) -> None:
    assert printed(monkeypatch, lambda: echo(HOSTILE, end=""), terminal, encoding) == expected


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_keeps_every_text_in_every_encoding(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, encoding: str
) -> None:
    value = {"text": HOSTILE, HOSTILE: [1, 0.5]}
    data = printed(monkeypatch, lambda: echo_json(value, indent=2), terminal, encoding).decode(encoding)
    assert json.loads(data) == value
    assert escape(data) == data


def test_json_has_neither_nan_nor_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    echo_json({"a": float("nan"), "b": [1.5, float("-inf"), {"c": float("inf")}], "d": (1, "NaN")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None, {"c": None}], "d": [1, "NaN"]}


def test_rich_output_is_neither_markup_nor_control(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.console import Console

    def write() -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("rich.console.Console.is_terminal", True)
        console, table = Console(), Table(box=None)
        table.add_column("[red]" + HOSTILE)
        table.add_row(HOSTILE + "[bold]:smile:")
        console.print(table)
        console.print(HOSTILE, "[link=http://x]y[/link]", Text("own", style="bold"))

    text = printed(monkeypatch, write, True, "utf-8").decode()
    for code in ("\x1b[1m", "\x1b[0m"):  # our own style
        assert code in text
        text = text.replace(code, "")
    for each in ("[red]a\\x1b]0;t", "[bold]:smile:", "[link=http://x]y[/link]", "\\u202eb\\u2066"):
        assert each in text
    assert escape(text) == text


class Failing(io.StringIO):
    """A stream that cannot be written."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_failing_stdout_ends_the_command_and_a_failing_stderr_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Failing())
    monkeypatch.setattr(sys, "stderr", Failing())
    echo("a note", err=True)
    CheckedStream(sys.stderr, err=True).write("a note")
    with pytest.raises(OutputError):
        echo("a result")
    with pytest.raises(OutputError):
        CheckedStream(sys.stdout, err=False).write("a result")
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    echo("closed")
    echo("closed", err=True)


def calls_of(tree: ast.AST) -> set[str]:
    """The names of the functions that are called."""
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_commands_print_through_one_function() -> None:
    others = {"print", "typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write", "RichConsole"}
    for path in SOURCES.rglob("*.py"):
        tree, name = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(SOURCES).as_posix()
        imports = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if name == "predict/rendering.py":  # answers its parent through a pipe
            continue
        assert not calls_of(tree) & others, name
        assert name == "cli/console.py" or "rich.console" not in imports, name
        assert not imports & {"rich", "rich.markup"}, name


COMMANDS: list[tuple[list[str], bytes]] = [
    (["models"], b""),
    (["presets", "tiny-gpt"], b""),
    (["info", "gpt", "--json"], b""),
    (["--help"], b""),
    (["tokenizer", "encode", "gpt"], b"a man\nthe dog\n" * 9),
    (["generate", "gpt", "a", "--max-new-tokens", "5", "--stream"], b""),
    (["chat", "gpt", "--max-new-tokens", "5"], b"hello\n/help\nthere\n"),
    (["translate", "tr", "a man"], b""),
    (["nonsense"], b""),
]
FAULTS = [
    *({number: fault} for number in ("1", "2") for fault in ("closed", "full", "left")),
    {"1": "full", "2": "left"},
    {"0": "closed", "1": "closed", "2": "closed"},
]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_fails_ends_with_one_line(folder: Path) -> None:
    problem = "clearhead: cannot write the output (No space left on device); free some space, or choose another place"
    cases = [(*command, faults) for faults in ({}, *FAULTS) for command in COMMANDS]
    results = calls(cases, folder)
    healthy = results[: len(COMMANDS)]
    for (arguments, _, faults), (was, text, notes), (code, output, errors) in zip(
        cases, healthy * (1 + len(FAULTS)), results, strict=True
    ):
        full = faults.get("1") == "full" and text != ""
        closed = "0" in faults and arguments[0] in ("chat", "tokenizer")  # they read standard input
        assert code == (2 if full or closed else was), (arguments, faults, errors)
        assert output == ("" if "1" in faults else text)
        assert set(errors.splitlines()) <= {*notes.splitlines(), problem}
        assert full == (problem in errors) or "2" in faults


def test_the_interpreter_ends_cleanly_when_output_fails(folder: Path) -> None:
    for redirection, code in ((">/dev/full", 2), (">&- 2>/dev/full", 0), ("| head -1", 0)):
        command = f"set -o pipefail; {sys.executable} -m clearhead models {redirection}"
        done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == code, redirection
        assert done.stderr.count("\n") == (redirection == ">/dev/full"), done.stderr


def test_a_name_with_markup_or_without_utf8_is_printed_as_it_is(folder: Path) -> None:
    name, markup = os.fsdecode(b"out\xff"), "[red]out[/red]"
    copytree(folder / "gpt", folder / name)
    results = calls(
        [
            (["info", name], b""),
            (["models"], b""),
            (["tokenizer", "stats", markup, "--file", f"{markup}/config.json"], b""),
            (["export", "gpt", markup, "--to", "hf"], b""),
            *((["export", "gpt", name, "--to", to], b"") for to in ("hf", "gguf")),
            (["train", "mini-en-de", "--out", name], b""),
            (["word2vec", "train", "gpt/config.json", "--out", name], b""),
        ],
        folder,
    )
    assert [code for code, _, _ in results] == [2, 0, 2, 0, 2, 2, 2, 2], results
    assert results[0][2].startswith(f"clearhead: {name}/model.safetensors cannot be read")
    assert "runs/[red]" in results[1][1]
    assert markup in results[2][2]
    assert results[3][1] == f"{markup}\n"
    for _, _, errors in results[4:]:
        assert errors == f"clearhead: {name}: the name is not UTF-8; choose another folder\n"
