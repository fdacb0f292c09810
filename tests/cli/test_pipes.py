"""Pipes: one line out per line in, in order; constant memory; complete lines after Ctrl-C and a closed pipe."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from clearhead.predict import load
from tests.cli.models import clearhead, make, start

LINES = ["a man sees the dog", "", "the dog", "a café and the dog sees a man", "   ", "unheard-of words", "a"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipes")
    make(folder / "tr", "tiny-translator")
    make(folder / "gpt", "tiny-gpt")
    return folder


def feed(child: "subprocess.Popen[bytes]", count: int) -> threading.Thread:
    """Send lines in a thread until the pipe is closed."""

    def send() -> None:
        assert child.stdin is not None
        try:
            for number in range(count):
                child.stdin.write(LINES[number % len(LINES)].encode() + b"\n")
            child.stdin.close()
        except (BrokenPipeError, ValueError):
            pass

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def memory(child: "subprocess.Popen[bytes]") -> int:
    """Resident memory of a process in bytes."""
    text = Path(f"/proc/{child.pid}/status").read_text()
    return 1024 * int(text.split("VmRSS:")[1].split()[0])


def test_one_line_out_per_line_in(models: Path) -> None:
    code, output, errors = clearhead("translate", models / "tr", "--beam", "2", stdin="\n".join(LINES))
    unknown = "1 of 7 lines: mostly words or characters that this model's tokenizer does not know"
    assert (code, errors) == (0, f"warning: standard input: {unknown}\n")
    lines = output.split("\n")
    assert lines == [*(each.text for each in load(models / "tr", "cpu").translate(LINES, beam=2)), ""]
    assert lines[1] == lines[4] == ""
    assert all(lines[number] for number in (0, 2, 3))


@pytest.mark.parametrize("samples", [1, 3])
def test_prompts_from_a_pipe_equal_single_prompts(models: Path, samples: int) -> None:
    options = ("--max-new-tokens", "20", "--seed", "5", "--stop", "e", "--samples", samples)
    arguments = ("generate", models / "gpt", *options)
    code, output, errors = clearhead(*arguments, "--json", stdin="\n".join(LINES))
    assert (code, errors) == (0, "")
    model = load(models / "gpt", "cpu")
    expected = []
    for number, line in enumerate(LINES):
        best = model.generate(
            line, seed=5 + number, stop=["e"], max_new_tokens=20, temperature=0.8, top_p=0.95, samples=samples
        )
        expected += [{"prompt": line, "text": text.text, "finished": text.finished} for text in best.candidates]
    assert [json.loads(line) for line in output.splitlines()] == expected
    if samples == 1:
        plain = clearhead(*arguments, stdin="\n".join(LINES))[1].split("\n")
        assert plain == [" ".join((each["prompt"] + each["text"]).splitlines()) for each in expected] + [""]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("command", "name", "options"), [("translate", "tr", "--beam 1"), ("generate", "gpt", "--max-new-tokens 2")]
)
def test_memory_does_not_grow_with_the_lines(models: Path, command: str, name: str, options: str) -> None:
    total = 6000
    child = start(command, models / name, *options.split())
    sender = feed(child, total)
    assert child.stdout is not None
    sizes, number = [], 0
    for number, line in enumerate(child.stdout, start=1):
        assert line.endswith(b"\n")
        if number in (total // 2, total // 3 * 2, total // 6 * 5):  # after the kernels of all shapes are built
            sizes.append(memory(child))
    sender.join()
    assert (child.wait(30), number) == (0, total)
    assert max(sizes) - sizes[0] < 8 << 20, sizes


def test_ctrl_c_is_not_lost_while_torch_is_imported(tmp_path: Path) -> None:
    swallow = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(swallow)  # as torch sometimes does
    command = [sys.executable, "-m", "clearhead", "translate", "en-de"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_ctrl_c_leaves_complete_lines(models: Path) -> None:
    expected = [each.text.encode() + b"\n" for each in load(models / "tr", "cpu").translate(LINES, beam=1)]
    child = start("translate", models / "tr", "--beam", "1")
    sender = feed(child, 100_000)
    assert child.stdout is not None
    assert child.stderr is not None
    lines = [child.stdout.readline() for _ in range(1200)]
    child.send_signal(signal.SIGINT)
    lines += child.stdout.readlines()
    assert child.wait(30) == 130
    sender.join()
    assert child.stderr.read() == b""
    assert len(lines) < 50_000
    assert all(line == expected[number % len(LINES)] for number, line in enumerate(lines))


@pytest.mark.parametrize("arguments", ["translate tr --beam 1", "generate gpt --max-new-tokens 2", "models"])
def test_a_closed_pipe_is_not_an_error(models: Path, arguments: str) -> None:
    child = start(*arguments.split(), cwd=models)
    sender = feed(child, 20_000)
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline()
    child.stdout.close()
    assert child.wait(30) == 0
    sender.join()
    assert child.stderr.read() == b""
