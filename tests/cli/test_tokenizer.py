"""`clearhead tokenizer train|encode|decode|stats` in a subprocess."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TEXT = "the cat sat on the mat\nder Hund läuft über die Straße\n猫坐在垫子上\n" * 30


def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", "tokenizer", *arguments], input=stdin, capture_output=True
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    code, _, errors = run("train", str(folder / "text.txt"), "--out", str(folder / "bytes"), "--vocab-size", "300")
    assert code == 0, errors
    assert "300 tokens in" in errors
    return folder


def test_encode_and_decode_round_trip(trained: Path) -> None:
    lines = "the dog, übermäßig\n\n坐 🐈 <pad>\n"
    code, ids, _ = run("encode", str(trained / "bytes"), stdin=lines.encode())
    assert code == 0
    assert ids.count("\n") == 3
    assert run("decode", str(trained / "bytes"), stdin=ids.encode()) == (0, lines, "")


def test_stats_compare_tokenizers(trained: Path) -> None:
    run("train", str(trained / "text.txt"), "--out", str(trained / "words"), "--kind", "word", "--vocab-size", "12")
    arguments = ("stats", str(trained / "bytes"), str(trained / "words"), "--file", str(trained / "text.txt"))
    rows = json.loads(run(*arguments, "--json")[1])
    assert [row["words"] for row in rows] == [390, 390]
    assert rows[0]["unknown_rate"] == 0
    assert rows[0]["round_trip_rate"] == 1
    assert rows[1]["unknown_rate"] > 0
    assert "token lengths in characters" in run(*arguments)[1]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["encode", "nowhere"], b"", "no model 'nowhere': neither a folder nor a name"),
        (["encode", "HERE/bytes"], b"ok\n\xff\n", "standard input, line 2: not valid UTF-8"),
        (["decode", "HERE/bytes"], b"1\n2 x\n", "standard input, line 2: expected ids"),
        (["decode", "HERE/bytes"], b"1\n2 99999\n", "standard input, line 2: id 99999 is not in the vocabulary"),
        (["train", "nofile", "--out", "HERE/new"], b"", "nofile does not exist"),
        (["train", "HERE/text.txt", "--out", "HERE/new", "--kind", "bytebpe"], b"", "did you mean byte-bpe?"),
        (["train", "HERE/text.txt", "--out", "HERE/new", "--roles", "pad,bos"], b"", "'bos' is not allowed"),
        (["train", "HERE/text.txt", "--out", "HERE/new", "--vocab-size", "20"], b"", "vocab_size: 20 is too small"),
        (["train", "-", "--out", "HERE/new"], b"", "no text to train"),
        (["train", "HERE", "--out", "HERE/new"], b"", "is a folder"),
        (["stats", "HERE/bytes", "--file", "/dev/null"], b"", "no text to measure"),
    ],
)
def test_an_error_is_one_line_and_writes_nothing(
    trained: Path, arguments: list[str], stdin: bytes, message: str
) -> None:
    code, _, errors = run(*(argument.replace("HERE", str(trained)) for argument in arguments), stdin=stdin)
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert not (trained / "new").exists()


def test_a_tokenizer_is_found_by_the_name_of_its_model(trained: Path) -> None:
    code, ids, errors = run("encode", "novels-gpt", stdin=b"It was a cold day\n")
    assert (code, errors) == (0, "")
    assert run("decode", "novels-gpt", stdin=ids.encode())[1] == "It was a cold day\n"
    pieces = run("encode", "novels-gpt", "--pieces", stdin=b"It was a cold day\n")[1].split()
    assert len(pieces) == len(ids.split())
    assert "".join(pieces).replace("▁", " ").strip() == "It was a cold day"


def test_damaged_gzip_is_reported(trained: Path) -> None:
    import gzip

    damaged = trained / "cut.txt.gz"
    damaged.write_bytes(gzip.compress(TEXT.encode(), mtime=0)[:-20])
    code, _, errors = run("train", str(damaged), "--out", str(trained / "new"))
    assert code == 2
    assert "the gzip data is truncated or damaged" in errors


def test_stats_plot_an_svg(trained: Path) -> None:
    plot = trained / "compared.svg"
    arguments = ("stats", str(trained / "bytes"), "--file", str(trained / "text.txt"), "--plot")
    assert run(*arguments, str(plot))[0] == 0
    root = ElementTree.parse(plot).getroot()
    text = "".join(root.itertext())
    assert "tokens per word" in text
    assert str(trained / "bytes")[-40:] in text
    code, _, errors = run(*arguments, str(trained / "compared.png"))
    assert (code, "compared.svg" in errors) == (2, True)


def test_a_vocabulary_larger_than_the_text_supports_is_refused(trained: Path) -> None:
    out = trained / "too-large"
    code, _, errors = run("train", str(trained / "text.txt"), "--out", str(out), "--vocab-size", "5000")
    assert code == 2
    assert "supports only" in errors
    assert not out.exists()
    assert run("train", str(trained / "text.txt"), "--out", str(out))[0] == 0  # without --vocab-size
