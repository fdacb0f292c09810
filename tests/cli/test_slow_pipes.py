"""Slow pipes: lines are processed on arrival, valid lines before an invalid one too; Ctrl-C ends the wait."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest

from clearhead.checkpoint import save_model
from clearhead.cli.batch import Batch, Failed
from clearhead.cli.text_input import CHUNK_SIZE, read_chunks
from clearhead.errors import UserError
from clearhead.files import read_lines
from clearhead.predict.encode_batch import InvalidText
from tests.cli.forked import calls
from tests.cli.models import make, start
from tests.predict.task_models import task_model

A = TypeVar("A")
BAD = b"\xff\xfe\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    make(folder / "tr", "tiny-translator")
    make(folder / "gpt", "tiny-gpt")
    for name, head in {"fill": "lm", "classify": "classes"}.items():
        made = task_model(head)
        save_model(folder / name, made.network, made.tokenizers, made.extra)
    return folder


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[bytes]]:
    """The write end of a pipe whose read end is standard input."""
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb", buffering=0) as writer, os.fdopen(read_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        timer = threading.Timer(10, writer.close)  # a failing test must not wait forever
        timer.start()
        yield writer
        timer.cancel()
        writer.close()  # ends the reader, so that standard input can be closed
        time.sleep(0.05)


def until_error(results: Iterator[A]) -> tuple[list[A], str]:
    """Collect results until an error; return both."""
    collected = []
    try:
        for result in results:
            collected.append(result)
    except UserError as error:
        return collected, str(error)
    return collected, "none"


def test_a_chunk_holds_the_lines_that_have_arrived(pipe: IO[bytes]) -> None:
    read = read_chunks(read_lines(Path("-")), Path("-"))
    pipe.write(b"one\n")
    assert next(read) == ["one"]
    pipe.write(b"two\nthree\nhalf of")
    assert next(read) == ["two", "three"]
    pipe.write(b" four\n")
    assert next(read) == ["half of four"]
    pipe.write(b"\nlast")
    assert next(read) == [""]
    pipe.close()
    assert list(read) == [["last"]]


def test_a_fast_pipe_fills_its_chunks(pipe: IO[bytes]) -> None:
    lines = [str(number) for number in range(3 * CHUNK_SIZE + 7)]  # less than a pipe holds
    pipe.write("\n".join(lines).encode())
    pipe.close()
    result = list(read_chunks(read_lines(Path("-")), Path("-")))
    assert [line for chunk in result for line in chunk] == lines
    assert max(map(len, result)) == CHUNK_SIZE
    assert len(result) <= 6  # 4, unless the machine is busy with something else


def test_quick_single_lines_share_chunks(pipe: IO[bytes]) -> None:
    def write() -> None:
        for number in range(100):
            pipe.write(f"{number}\n".encode())
            time.sleep(0.0005)
        pipe.close()

    sender = threading.Thread(target=write)
    sender.start()
    result = list(read_chunks(read_lines(Path("-")), Path("-")))
    sender.join()
    assert sum(map(len, result)) == 100
    assert len(result) < 50


def test_a_steady_trickle_does_not_delay_a_chunk(pipe: IO[bytes]) -> None:
    def trickle() -> None:
        for number in range(200):
            pipe.write(f"{number}\n".encode())
            time.sleep(0.003)

    sender = threading.Thread(target=trickle)
    sender.start()
    read = read_chunks(read_lines(Path("-")), Path("-"))
    first = next(read)
    late = not sender.is_alive()
    sender.join()
    pipe.close()
    assert not late
    assert [int(line) for chunk in [first, *read] for line in chunk] == list(range(200))


def test_reading_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, space: memoryview) -> int:  # type: ignore[override]
            nonlocal reads
            reads += 1
            space[:5] = b"line\n"
            return 5

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    assert len(next(read_chunks(read_lines(Path("-")), Path("-")))) <= CHUNK_SIZE
    time.sleep(0.2)
    assert reads <= 2 * CHUNK_SIZE + 2


def test_chunks_of_a_slow_file_are_full(tmp_path: Path) -> None:
    def slowly(path: Path) -> Iterator[str]:
        for number, line in enumerate(read_lines(path)):
            if number % 300 == 5:
                time.sleep(0.1)
            yield line

    path = tmp_path / "lines.txt"
    path.write_text("line\n" * (CHUNK_SIZE + 7))
    assert [len(chunk) for chunk in read_chunks(slowly(path), path)] == [CHUNK_SIZE, 7]


@pytest.mark.parametrize("before", [0, 2, CHUNK_SIZE, CHUNK_SIZE + 1])
def test_lines_before_an_unreadable_line_come_first(pipe: IO[bytes], before: int) -> None:
    pipe.write(b"good\n" * before + b"\0\n" + b"good\n")
    pipe.close()
    results, error = until_error(read_chunks(read_lines(Path("-")), Path("-")))
    assert [line for chunk in results for line in chunk] == ["good"] * before
    assert error.startswith(f"standard input, line {before + 1}: contains a zero byte")


def check_lines(chunk: list[str]) -> list[int]:
    """Return the lengths of lines; a later invalid one is reported first."""
    assert chunk
    for invalid in ("worse", "bad"):
        if invalid in chunk:
            raise InvalidText(chunk.index(invalid), f"{invalid}; fix it")
    return [len(line) for line in chunk]


def batch_of(source: str, lines: list[str], folder: Path, pipe: IO[bytes], **options: Any) -> Batch:
    """The same lines as arguments, a pipe or a file."""
    text = "\n".join(lines).encode()
    (folder / "lines.txt").write_bytes(text)
    pipe.write(text)
    pipe.close()
    file = folder / "lines.txt" if source == "file" else None
    return Batch(lines if source == "texts" else None, file, **options)


@pytest.mark.parametrize("source", ["texts", "pipe", "file"])
@pytest.mark.parametrize("before", [0, 2, CHUNK_SIZE, CHUNK_SIZE + 1])
def test_results_before_an_invalid_text_come_first(pipe: IO[bytes], tmp_path: Path, before: int, source: str) -> None:
    lines = [*(f"{number}" for number in range(before)), "bad", "good", "worse"]
    batch = batch_of(source, lines, tmp_path, pipe, on_error="stop")
    where = {"texts": "text", "pipe": "standard input, line", "file": f"{tmp_path / 'lines.txt'}, line"}[source]

    def until_stopped() -> Iterator[tuple[str, int]]:
        for record, result in batch.results(check_lines):
            if isinstance(result, Failed):
                batch.count_failure(record, result)
            yield record.texts[0], result

    results, error = until_error(until_stopped())
    assert results == [(line, len(line)) for line in lines[:before]]
    assert error == f"{where} {before + 1}: bad; fix it"


@pytest.mark.parametrize("before", [0, 2, CHUNK_SIZE, CHUNK_SIZE + 1])
def test_invalid_texts_keep_their_place_among_the_results(pipe: IO[bytes], tmp_path: Path, before: int) -> None:
    lines = ["bad", *(f"{number}" for number in range(before)), "bad", "good", "worse", "bad"]
    batch = batch_of("pipe", lines, tmp_path, pipe)
    results = [(record.number, record.texts[0], result) for record, result in batch.results(check_lines)]
    wrong = {"bad": Failed("bad; fix it"), "worse": Failed("worse; fix it")}
    assert results == [(number, line, wrong.get(line, len(line))) for number, line in enumerate(lines, start=1)]


def test_an_invalid_line_does_not_lose_valid_ones(models: Path) -> None:
    cases = [
        ("translate tr --beam 1", b"the dog\n", BAD, "not valid UTF-8"),
        ("translate tr --beam 1", b"the dog\n", b"a " * 200 + b"\n", "tokens, but the model has"),
        ("generate gpt --max-new-tokens 2", b"the dog\n", b"a " * 200 + b"\n", "but the model has 128 positions"),
        ("generate gpt --max-new-tokens 2", b"the dog\n", BAD, "not valid UTF-8"),
        ("fill fill", b"a [MASK]\n", b"no gap\n", "no mask in it"),
        ("classify classify", b"cat\n", b"\n", "empty; give some text"),
    ]
    ways = {"mark": 4, "skip": 3, "stop": 2}  # lines of output
    calling = [
        ([*arguments.split(), "--on-error", way], 2 * good + bad + good)
        for arguments, good, bad, _ in cases
        for way in ways
    ]
    results = iter(calls(calling, models))
    for *_, problem in cases:
        for way, lines in ways.items():
            code, output, errors = next(results)
            assert (code, output.count("\n"), errors.count("\n")) == (2, lines, 1), errors
            assert problem in errors
            if way == "stop":
                assert errors.startswith("clearhead: standard input, line 3: ")
                continue
            fate = "left empty in the output" if way == "mark" else "left out"
            assert errors.startswith(f"clearhead: standard input: 1 of 4 lines failed, {fate}; line 3: ")
            marked = output.split("\n")
            assert marked[0] == marked[lines - 1] != ""
            assert marked.count("") == 2 - (way == "skip")


def ask(child: "subprocess.Popen[bytes]", line: bytes) -> bytes:
    """Send a line and return the answer, while the pipe stays open."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(line)
    child.stdin.flush()
    timer = threading.Timer(30, child.kill)  # a failing test must not wait forever
    timer.start()
    answer = child.stdout.readline()
    timer.cancel()
    return answer


@pytest.mark.parametrize("command", ["translate tr --beam 1", "generate gpt --max-new-tokens 3 --temperature 0"])
def test_lines_are_answered_one_by_one_and_ctrl_c_ends_the_wait(command: str, models: Path) -> None:
    child = start(*command.split(), cwd=models)
    answers = [ask(child, b"the dog\n") for _ in range(3)]
    assert answers[0].endswith(b"\n")
    assert set(answers) == {answers[0]}
    child.send_signal(signal.SIGINT)
    assert (child.wait(30), *child.communicate()) == (130, b"", b"")


@pytest.mark.parametrize("command", ["classify classify", "generate gpt --max-new-tokens 3 --temperature 0"])
def test_every_line_is_answered_while_the_pipe_is_open(command: str, models: Path) -> None:
    bad = {"classify": b"\n", "generate": b"a " * 200 + b"\n"}[command.partition(" ")[0]]
    child = start(*command.split(), cwd=models)
    assert ask(child, b"cat\n") != b"\n"
    assert ask(child, bad) == b"\n"
    assert ask(child, b"cat\n") != b"\n"
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 2
    assert b"1 of 3 lines failed" in errors


def test_an_error_ends_the_command_while_the_pipe_is_open(models: Path) -> None:
    child = start("classify", "classify", "--on-error", "stop", cwd=models)
    assert ask(child, b"cat\n")
    assert ask(child, b"\n") == b""
    assert child.wait(30) == 2
    assert child.stderr is not None
    assert child.stderr.read() == b"clearhead: standard input, line 2: empty; give some text\n"
