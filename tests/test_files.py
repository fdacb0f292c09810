"""Files and standard input: reading, gzip, atomic writing, errors in one line."""

import gzip
import io
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clearhead import files
from clearhead.errors import UserError
from clearhead.files import parse_json, read_document, read_lines, write_text
from clearhead.text.tensors import save_tensors

STDIN = Path("-")


def standard_input(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))


def write_tensor(path: Path) -> None:
    save_tensors(path, {"x": torch.zeros(1)})


@pytest.mark.parametrize("write", [lambda path: write_text(path, "x"), write_tensor], ids=["text", "tensors"])
def test_a_failed_write_names_file_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("file/new", "file/deep/new"):
        with pytest.raises(UserError, match=r"new cannot be written \((Not a directory|File exists)\)"):
            write(tmp_path / name)

    def read_only(self: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(self))

    for method in ("mkdir", "open", "unlink"):
        monkeypatch.setattr(Path, method, read_only)
    with pytest.raises(UserError, match=r"new cannot be written \(Read-only file system\); nothing was changed"):
        write(tmp_path / "new")


def test_standard_input_is_read_once_and_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", standard_input(b"one\ntwo\n"))
    assert list(read_lines(STDIN)) == ["one", "two"]
    assert not sys.stdin.buffer.closed
    with pytest.raises(UserError, match="standard input can be read only once"):
        next(read_lines(STDIN))


def test_standard_input_may_be_gzipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", standard_input(gzip.compress(b"one\ntwo\n", mtime=0)))
    assert list(read_lines(STDIN)) == ["one", "two"]


def test_closed_standard_input_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = standard_input(b"")
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(UserError, match="standard input is closed"):
            next(read_lines(STDIN))


@pytest.mark.parametrize("data", [b"one\nt\0wo\n", b"one\n\xff\xfet\0w\0o\0\n\0"])
def test_zero_bytes_are_an_error_with_the_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "text").write_bytes(data)
    with pytest.raises(UserError, match=r"text, line 2: contains a zero byte; if the file is UTF-16, save it as"):
        list(read_lines(tmp_path / "text"))


def test_read_document_keeps_line_ends(tmp_path: Path) -> None:
    text = "Zoë\r\n猫\n" + "x" * (1 << 21)
    (tmp_path / "plain.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text.encode()))
    assert read_document(tmp_path / "plain.txt") == read_document(tmp_path / "packed.gz") == text
    (tmp_path / "cut.gz").write_bytes(gzip.compress(text.encode())[:-20])
    with pytest.raises(UserError, match=r"cut.gz: the gzip data is truncated or damaged; fetch it again"):
        read_document(tmp_path / "cut.gz")


def test_an_endless_line_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"fine\n" + b"x" * 50_000_000)
    (tmp_path / "text.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    for file in (path, tmp_path / "text.gz"):
        tracemalloc.start()
        with pytest.raises(UserError, match=r"text(\.gz)?, line 2: longer than 1,048,576 bytes; split it into lines"):
            list(read_lines(file))
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
        tracemalloc.stop()
    with pytest.raises(UserError, match=r"text: larger than 1,000 bytes; split it into several files"):
        read_document(path, 1000)
    (tmp_path / "lines").write_bytes(b"x\n" * 11)
    assert len(list(read_lines(tmp_path / "lines", max_lines=11))) == 11
    with pytest.raises(UserError, match=r"lines: more than 10 lines; check that it is the right file"):
        list(read_lines(tmp_path / "lines", max_lines=10))


def test_an_endless_line_on_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/zero", "rb") as endless:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(endless))
        with pytest.raises(UserError, match=r"standard input, line 1: longer than 1,048,576 bytes"):
            list(read_lines(STDIN))


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "GZIP_ALLOWANCE", 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"bomb\n" * 4_000_000))
    with pytest.raises(UserError, match=r"bomb.gz: the gzip data unpacks to over 200 times its size; unpack it first"):
        list(read_lines(path))
    with pytest.raises(UserError, match=r"bomb.gz: the gzip data unpacks to over 200 times"):
        read_document(path, 1 << 25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" + "[]," * 1_200_000 + "0]", r"1,200,001 objects and lists, more than JSON of this size may have"),
        ("[" * 101 + "]" * 101, r"not valid JSON \(nested more than 100 deep\)"),
        ('{"x":' * 100_000, r"not valid JSON"),
        ("1" * 5000, r"not valid JSON \(Exceeds the limit"),
        ('{"x"', r"not valid JSON \(Expecting ':' delimiter"),
    ],
)
def test_json_that_is_far_larger_as_objects_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json_may_have_brackets_in_strings_and_100_levels() -> None:
    for value in ({"x": ['"[' * 200, "\\", '\\"[', "}" * 200]}, json.loads("[" * 100 + "]" * 100)):
        assert parse_json(json.dumps(value)) == value
