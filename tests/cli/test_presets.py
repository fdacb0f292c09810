"""`clearhead presets`; help, version and exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clearhead import __version__, cli
from clearhead.cli import app
from clearhead.config import preset


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_json_lists_the_costs_of_every_preset() -> None:
    rows = {row["name"]: row for row in json.loads(run("presets", "--json").stdout)}
    assert rows["llama3-70b"]["parameters"] == 70_553_706_496
    for row in rows.values():
        assert {"name", "family", "parameters", "weight_bytes", "flops_per_token"} <= row.keys()
        assert row["weight_bytes"] == 4 * row["parameters"]
        assert row["flops_per_token"] > 0


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16"])
def test_one_preset_with_overrides(dtype: str) -> None:
    done = run("presets", "gpt2", "vocab_size=50304", "--json", "--dtype", dtype, "--context", "128")
    (row,) = json.loads(done.stdout)
    assert row["dtype"] == "bf16"
    assert row["parameters"] == 124_439_808 + 47 * 768
    assert row["weight_bytes"] == 2 * row["parameters"]
    assert (row["context"], row["cache_bytes"]) == (128, 2 * 12 * 768 * 128 * 2)


def test_the_table_shows_exact_counts_in_eighty_columns() -> None:
    text = run("presets").stdout
    assert "174,604,259,328" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "rope_theta: 500000.0" in run("presets", "llama3-8b").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["presets", "--dtype", "int8"], "--dtype: 'int8' is not allowed; use fp32, bf16, fp16 or"),
        (["presets", "gpt2", "--context", "0"], "context"),
        (["presets", "gpt2", "--context", "many"], "context"),
        (["presets", "gpt2", "--context", "5000"], "more than gpt2's max_positions 1,024"),
        (["presets", ""], "no preset ''"),
        (["presets", "gpt2", "dim=010"], "'010' is not a whole number"),
        (["pressets"], "No such command"),
    ],
)
def test_wrong_options_end_with_exit_code_two(arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, "-m", "clearhead", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version_never_import_torch() -> None:
    code = "import sys; sys.argv = ['clearhead', sys.argv[1]]\nfrom clearhead.cli import main\ntry: main()\n"
    code += "except SystemExit: pass\nassert 'torch' not in sys.modules"
    for option, text in (("--help", "presets"), ("--version", __version__)):
        done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout


def test_a_closed_pipe_is_not_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", "presets", "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 0
    assert done.stderr == ""


def test_every_command_has_help_with_an_example() -> None:
    groups = {"": cli.app, "tokenizer ": cli.tokenizer.app, "word2vec ": cli.word2vec.app}
    for prefix, group in groups.items():
        for command in group.registered_commands:
            name = prefix + (command.name or command.callback.__name__)
            done = run(*name.split(), "--help")
            assert done.exit_code == 0
            [example, *_] = [line for line in done.stdout.splitlines() if "Example: " in line]
            assert f"clearhead {name}" in example or command.hidden


def test_the_printed_settings_build_the_same_model(tmp_path: Path) -> None:
    for name in ("llama3.2-1b", "bert-base", "gpt3"):
        text = run("presets", name).stdout
        path = tmp_path / f"{name}.yaml"
        path.write_text(text[text.index("family:") :])
        assert preset(path) == preset(name)


@pytest.mark.parametrize("command", [["presets"], ["demo", "--steps", "1"]])
def test_an_ascii_terminal_and_a_full_disk_do_not_crash(command: list[str], tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "clearhead", *command]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(arguments, capture_output=True, env=environment, check=False, cwd=tmp_path)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, check=False, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(b"clearhead: cannot write the output (No space left on device)")
        assert done.stderr.count(b"\n") == 1


def test_an_interrupted_demo_exits_without_a_traceback(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "clearhead", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, b"")
