"""`clearhead word2vec train|neighbours|analogy|evaluate|export`."""

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.cli import main
from clearhead.text.word2vec import Training

TEXT = "The king rules the land. The queen rules the land! A dog eats meat. A cat eats fish.\n" * 60


def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run `clearhead word2vec …` in this process; return exit code, stdout and stderr."""
    out, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["clearhead", "word2vec", *arguments])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", errors)
        with pytest.raises(SystemExit) as stop:
            main()
    printed = []
    for stream in (out, errors):
        stream.flush()
        printed.append(stream.buffer.getvalue().decode())
    return int(stop.value.code or 0), *printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("word2vec")
    (folder / "text.txt.gz").write_bytes(gzip.compress(TEXT.encode(), mtime=0))
    (folder / "pairs.tsv").write_text("king\tqueen\t9\nking\tfish\t1\nking\tzebra\t3\n", encoding="utf-8")
    (folder / "questions.txt").write_text(": animals\ndog meat cat fish\n", encoding="utf-8")
    (folder / "empty.txt").write_text("", encoding="utf-8")
    options = ("--dim", "8", "--window", "3", "--epochs", "10", "--sample", "1", "--workers", "1", "--json")
    code, out, errors = run("train", str(folder / "text.txt.gz"), "--out", str(folder / "vectors"), *options)
    assert code == 0, errors
    assert "1,080 words, vocabulary 11 (count >= 5)" in errors
    assert "100%" in errors
    assert "words/s" in errors
    result = json.loads(out)
    assert (result["vocab_size"], result["words"], result["dim"], result["lr"]) == (11, 1080, 8, 0.035)
    return folder


def test_neighbors_and_analogies(trained: Path) -> None:
    vectors = str(trained / "vectors")
    code, out, _ = run("neighbors", vectors, "king", "dog", "--top-k", "3")
    assert code == 0
    assert [line for line in out.splitlines() if line.endswith(":")] == ["king:", "dog:"]
    assert out.count("\n") == 8
    rows = json.loads(run("neighbors", vectors, "king", "--json")[1])["king"]
    assert len(rows) == 10
    assert [row["cosine"] for row in rows] == sorted((row["cosine"] for row in rows), reverse=True)
    assert run("neighbours", vectors, "king") == run("neighbors", vectors, "king")  # American alias
    answers = json.loads(run("analogy", vectors, "dog", "meat", "cat", "--json")[1])
    assert len(answers) == 5
    assert not {"dog", "meat", "cat"} & {row["word"] for row in answers}
    assert run("analogy", vectors, "dog", "meat", "cat", "--top-k", "1")[1].split()[1] == answers[0]["word"]


def test_evaluate(trained: Path) -> None:
    arguments = ("evaluate", str(trained / "vectors"), "--pairs", str(trained / "pairs.tsv"))
    code, out, _ = run(*arguments, "--analogies", str(trained / "questions.txt"))
    assert code == 0
    assert "on 2 pairs (1 with unknown words)" in out
    assert "animals" in out
    data = json.loads(run(*arguments, "--analogies", str(trained / "questions.txt"), "--json")[1])
    assert abs(data["pairs"][0]["spearman"]) == pytest.approx(1)
    assert [row["name"] for row in data["analogies"]] == ["animals", "all"]


def test_the_exported_text_file_equals_the_folder(trained: Path) -> None:
    text = str(trained / "vectors.txt")
    assert run("export", str(trained / "vectors"), text)[0] == 0
    assert (trained / "vectors.txt").read_text(encoding="utf-8").startswith("11 8\nthe ")
    assert run("neighbors", text, "king") == run("neighbors", str(trained / "vectors"), "king")


def test_one_worker_is_reproducible_and_cbow_differs(trained: Path) -> None:
    for name, *more in (("one",), ("two",), ("three", "--cbow")):
        code, _, errors = run(
            "train", "-", "--out", str(trained / name), "--dim", "4", "--workers", "1", *more, stdin=TEXT.encode()
        )
        assert code == 0, errors
    one, two, three = ((trained / name / "vectors.safetensors").read_bytes() for name in ("one", "two", "three"))
    assert one == two != three


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nofile", "--out", "HERE/new"], "nofile does not exist"),
        (["train", "HERE", "--out", "HERE/new"], "is a folder"),
        (["train", "HERE/empty.txt", "--out", "HERE/new"], "no words to train on"),
        (["train", "HERE/text.txt.gz", "--out", "HERE/new", "--min-count", "9999"], "no word occurs 9999 times"),
        (["train", "HERE/text.txt.gz", "--out", "HERE/new", "--dim", "0"], "dim: 0 is too small"),
        (["train", "HERE/text.txt.gz", "--out", "HERE/new", "--device", "gpu"], "--device: 'gpu' is not available"),
        (["train", "-", "-", "--out", "HERE/new/deep"], "standard input can be read only once"),
        (["neighbors", "HERE/nowhere", "king"], "nowhere does not exist"),
        (["neighbors", "HERE/vectors", "quene"], "'quene' is not in the vocabulary of 11 words; did you mean queen?"),
        (["neighbors", "HERE/pairs.tsv", "king"], "line 1: expected the number of words"),
        (["analogy", "HERE/vectors", "king", "queen", "zebra"], "'zebra' is not in the vocabulary"),
        (["analogy", "HERE/vectors", "king", "queen"], "Missing argument"),
        (["evaluate", "HERE/vectors"], "--pairs, --analogies: missing"),
        (["evaluate", "HERE/vectors", "--pairs", "HERE/questions.txt"], "line 1: expected two words and a score"),
        (["evaluate", "HERE/vectors", "--analogies", "HERE/pairs.tsv"], "line 1: expected four words"),
    ],
)
def test_an_error_is_one_line_and_writes_nothing(trained: Path, arguments: list[str], message: str) -> None:
    code, _, errors = run(*(argument.replace("HERE", str(trained)) for argument in arguments))
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert not (trained / "new").exists()


def test_a_diverged_training_writes_nothing(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "_update", lambda self, *_: self.inputs.fill_(float("nan")))
    code, _, errors = run("train", str(trained / "text.txt.gz"), "--out", str(trained / "new" / "deep"))
    assert code == 2
    assert "training diverged: a vector is not finite; lower --lr" in errors
    assert not (trained / "new").exists()


@pytest.mark.parametrize("out", ["empty.txt", "empty.txt/deep"])
def test_an_unwritable_folder_is_reported_before_training(
    trained: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Training, "__iter__", lambda self: pytest.fail("trained before the check"))
    code, _, errors = run("train", str(trained / "text.txt.gz"), "--out", str(trained / out))
    assert code == 2
    assert f"{out} (" in errors
    assert errors.count("\n") == 1


def test_help_has_an_example() -> None:
    for command in ("train", "neighbours", "analogy", "evaluate", "export"):
        assert f"Example: clearhead word2vec {command}" in run(command, "--help")[1]


def test_the_installed_command_exits_with_2(trained: Path) -> None:
    command = [sys.executable, "-m", "clearhead", "word2vec", "neighbors", str(trained / "vectors"), "quene"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.decode() == "clearhead: 'quene' is not in the vocabulary of 11 words; did you mean queen?\n"
