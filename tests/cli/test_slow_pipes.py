"""Lines are answered when they come, the good ones before a bad one, too; who waits for input can be stopped."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

import pytest

from clearhead.checkpoint import save_model
from clearhead.cli.text_input import CHUNK, chunks, each_text
from clearhead.errors import UserError
from clearhead.predict.encode_batch import InvalidText
from tests.cli.forked import calls
from tests.cli.models import make, start
from tests.predict.readers import reader

A = TypeVar("A")
BAD = b"\xff\xfe\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    make(folder / "tr", "tiny-translator")
    make(folder / "gpt", "tiny-gpt")
    for name, head in {"fill": "words", "classify": "classes"}.items():
        made = reader(head)
        save_model(folder / name, made.network, made.tokenizers, made.extra)
    return folder


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[bytes]]:
    """The end that is written to; standard input is the other."""
    inside, outside = os.pipe()
    with os.fdopen(outside, "wb", buffering=0) as writer, os.fdopen(inside) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        watch = threading.Timer(10, writer.close)  # else one who waits for a line that never comes is waited for
        watch.start()
        yield writer
        watch.cancel()
        writer.close()  # so that whoever reads comes to an end, and standard input can be closed
        time.sleep(0.05)


def until_error(found: Iterator[A]) -> tuple[list[A], str]:
    """What comes before the error, and what that says."""
    seen = []
    try:
        for one in found:
            seen.append(one)
    except UserError as error:
        return seen, str(error)
    return seen, "none"


def test_what_is_there_is_a_chunk_and_nobody_waits_for_more(pipe: IO[bytes]) -> None:
    found = chunks(Path("-"))
    pipe.write(b"one\n")
    assert next(found) == ["one"]
    pipe.write(b"two\nthree\nhalf of")
    assert next(found) == ["two", "three"]
    pipe.write(b" four\n")
    assert next(found) == ["half of four"]
    pipe.write(b"\nlast")
    assert next(found) == [""]
    pipe.close()
    assert list(found) == [["last"]]


def test_a_fast_pipe_fills_its_chunks(pipe: IO[bytes]) -> None:
    lines = [str(number) for number in range(3 * CHUNK + 7)]  # less than a pipe holds
    pipe.write("\n".join(lines).encode())
    pipe.close()
    found = list(chunks(Path("-")))
    assert [line for chunk in found for line in chunk] == lines
    assert max(map(len, found)) == CHUNK
    assert len(found) <= 6  # 4, unless the machine is busy with something else


def test_one_who_writes_line_by_line_without_a_pause_fills_chunks(pipe: IO[bytes]) -> None:
    def write() -> None:
        for number in range(100):
            pipe.write(f"{number}\n".encode())
            time.sleep(0.0005)
        pipe.close()

    sender = threading.Thread(target=write)
    sender.start()
    found = list(chunks(Path("-")))
    sender.join()
    assert sum(map(len, found)) == 100
    assert len(found) < 50


def test_a_steady_trickle_does_not_put_a_chunk_off(pipe: IO[bytes]) -> None:
    def trickle() -> None:
        for number in range(200):
            pipe.write(f"{number}\n".encode())
            time.sleep(0.003)

    sender = threading.Thread(target=trickle)
    sender.start()
    found = chunks(Path("-"))
    first = next(found)
    late = not sender.is_alive()
    sender.join()
    pipe.close()
    assert not late
    assert [int(line) for chunk in [first, *found] for line in chunk] == list(range(200))


def test_no_more_is_read_than_can_be_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, space: memoryview) -> int:  # type: ignore[override]
            nonlocal taken
            taken += 1
            space[:5] = b"line\n"
            return 5

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    assert len(next(chunks(Path("-")))) <= CHUNK
    time.sleep(0.2)
    assert taken <= 2 * CHUNK + 2


def test_chunks_of_a_file_are_full_however_long_its_reading_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead import files

    read = files.read_lines

    def slowly(path: Path) -> Iterator[str]:
        for number, line in enumerate(read(path)):
            if number % 300 == 5:
                time.sleep(0.1)
            yield line

    (tmp_path / "lines.txt").write_text("line\n" * (CHUNK + 7))
    monkeypatch.setattr(files, "read_lines", slowly)
    assert [len(chunk) for chunk in chunks(tmp_path / "lines.txt")] == [CHUNK, 7]


@pytest.mark.parametrize("before", [0, 2, CHUNK, CHUNK + 1])
def test_lines_before_one_that_cannot_be_read_come_first(pipe: IO[bytes], before: int) -> None:
    pipe.write(b"good\n" * before + BAD + b"good\n")
    pipe.close()
    seen, error = until_error(chunks(Path("-")))
    assert [line for chunk in seen for line in chunk] == ["good"] * before
    assert error.startswith(f"standard input, line {before + 1}: not valid UTF-8")


@pytest.mark.parametrize("source", ["texts", "pipe", "file"])
@pytest.mark.parametrize("before", [0, 2, CHUNK, CHUNK + 1])
def test_lines_before_one_that_cannot_be_worked_on_are_answered_first(
    pipe: IO[bytes], tmp_path: Path, before: int, source: str
) -> None:
    def work(chunk: list[str]) -> list[int]:
        assert chunk
        for wrong in ("worse", "bad"):  # what is seen first need not come first
            if wrong in chunk:
                raise InvalidText(chunk.index(wrong), f"{wrong}; mend it")
        return [len(line) for line in chunk]

    lines = [*(f"{number}" for number in range(before)), "bad", "good", "worse"]
    text = "\n".join(lines).encode()
    (tmp_path / "lines.txt").write_bytes(text)
    pipe.write(text)
    pipe.close()
    file = tmp_path / "lines.txt" if source == "file" else None
    where = {"texts": "text", "pipe": "standard input, line", "file": f"{file}, line"}[source]
    seen, error = until_error(each_text(lines if source == "texts" else None, file, work))
    assert seen == [(line, len(line)) for line in lines[:before]]
    assert error == f"{where} {before + 1}: bad; mend it"


def test_one_bad_line_costs_no_good_one(models: Path) -> None:
    cases = [
        ("translate tr --beam 1", b"the dog\n", BAD, "not valid UTF-8"),
        ("translate tr --beam 1", b"the dog\n", b"a " * 200 + b"\n", "tokens, but the model has"),
        ("fill fill", b"a [MASK]\n", b"no gap\n", "no mask in it"),
        ("classify classify", b"cat\n", b"\n", "empty; give some text"),
    ]
    found = calls([(arguments.split(), 2 * good + bad + good) for arguments, good, bad, _ in cases], models)
    for (*_, problem), (code, output, errors) in zip(cases, found, strict=True):
        assert (code, output.count("\n"), errors.count("\n")) == (2, 2, 1)
        assert errors.startswith("clearhead: standard input, line 3: ")
        assert problem in errors


def answered(child: "subprocess.Popen[bytes]", line: bytes) -> bytes:
    """What comes back for a line while the pipe stays open."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(line)
    child.stdin.flush()
    watch = threading.Timer(30, child.kill)  # else a child that waits for more would be waited for
    watch.start()
    found = child.stdout.readline()
    watch.cancel()
    return found


@pytest.mark.parametrize("asked", ["translate tr --beam 1", "generate gpt --max-new-tokens 3 --temperature 0"])
def test_a_process_can_ask_and_wait_for_the_answer_and_ctrl_c_ends_it(asked: str, models: Path) -> None:
    child = start(*asked.split(), cwd=models)
    answers = [answered(child, b"the dog\n") for _ in range(3)]
    assert answers[0].endswith(b"\n")
    assert set(answers) == {answers[0]}
    child.send_signal(signal.SIGINT)
    assert (child.wait(30), *child.communicate()) == (130, b"", b"")


def test_a_mistake_ends_it_while_the_pipe_is_open(models: Path) -> None:
    child = start("classify", "classify", cwd=models)
    assert answered(child, b"cat\n")
    assert answered(child, b"\n") == b""
    assert child.wait(30) == 2
    assert child.stderr is not None
    assert child.stderr.read() == b"clearhead: standard input, line 2: empty; give some text\n"
