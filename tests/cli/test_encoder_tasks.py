"""fill, classify, tag, answer, embed and similar: texts, files, pipes, JSON and errors."""

import gzip
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead import cli
from clearhead.checkpoint import save_model
from clearhead.predict import Model, load
from clearhead.predict.results import Span, Tagging
from tests.cli.models import make
from tests.predict.task_models import LABELS, task_model

TEXTS = ["The cat sat.", "猫坐在 the mat", "Zoë's dog 🐈"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model folders for each command, and of a decoder."""
    folder = tmp_path_factory.mktemp("models")
    tasks = {
        "fill": task_model("lm"),
        "classify": task_model("classes"),
        "tag": task_model("tags"),
        "answer": task_model("span"),
    }
    tasks |= {
        "pairs": task_model("classes", text_pairs=True),
        "embed": task_model(""),
        "decoder": task_model("lm", family="tiny-gpt"),
    }
    for name, model in tasks.items():
        save_model(folder / name, model.network, model.tokenizers, model.extra)
    return {name: str(folder / name) for name in tasks}


def main(*arguments: str, stdin: str | None = "") -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["clearhead", *arguments])
        patch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, stdin: str = "") -> str:
    code = main(*arguments, stdin=stdin)
    out, errors = capsys.readouterr()
    assert code == 0, errors
    return out


def same_by_text_file_and_pipe(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> list[Any]:
    """The JSON output, after checking that it is the same for arguments, a file and a pipe."""
    lines = "".join(f"{text}\n" for text in TEXTS)
    (folder / "texts.txt").write_text(lines, encoding="utf-8")
    outs = [
        output_of(capsys, *arguments, *TEXTS, "--json"),
        output_of(capsys, *arguments, "--file", str(folder / "texts.txt"), "--json"),
        output_of(capsys, *arguments, "--json", stdin=lines),
    ]
    assert outs[0] == outs[1] == outs[2]
    return [json.loads(line) for line in outs[0].splitlines()]


def test_classify(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = same_by_text_file_and_pipe(capsys, tmp_path, "classify", models["classify"])
    for row, result in zip(rows, load(models["classify"], "cpu").classify(TEXTS), strict=True):
        assert row["label"] == result.label
        assert row["scores"] == result.scores
    plain = output_of(capsys, "classify", models["classify"], *TEXTS)
    assert [line.split("\t")[0] for line in plain.splitlines()] == [row["label"] for row in rows]
    assert output_of(capsys, "classify", models["classify"], "a", "--all").count("\t") == 2 * len(LABELS) - 1
    pairs = [output_of(capsys, "classify", models["pairs"], "a cat", "--text-pair", "dog")]
    pairs += [output_of(capsys, "classify", models["pairs"], stdin="a cat\tdog\n")]
    assert pairs[0] == pairs[1]


def test_tag(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = same_by_text_file_and_pipe(capsys, tmp_path, "tag", models["tag"])
    for row, text in zip(rows, TEXTS, strict=True):
        assert row["text"] == text
        for each in [*row["words"], *row["spans"]]:
            assert each["text"] == text[each["start"] : each["end"]]
    plain = output_of(capsys, "tag", models["tag"], *TEXTS)
    blocks = [[line.split("\t") for line in block.splitlines()] for block in plain.strip().split("\n\n")]
    assert blocks == [[[word["text"], word["tag"]] for word in row["words"]] for row in rows]
    kept = output_of(capsys, "tag", models["tag"], "Zoë's 猫坐在 mat.", "--pretokenized")
    assert [line.split("\t")[0] for line in kept.split("\n") if line] == ["Zoë's", "猫坐在", "mat."]
    text = "  Zoë's \t猫坐在\u3000mat.  The cat sat "
    row = json.loads(output_of(capsys, "tag", models["tag"], text, "--pretokenized", "--json"))
    assert row["text"] == text
    assert [word["text"] for word in row["words"]] == text.split()
    assert row["spans"]
    assert all(text[each["start"] : each["end"]] == each["text"] for each in [*row["words"], *row["spans"]])


def test_tag_colors_spans_on_a_terminal(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.cli import encoder_tasks

    tagged = load(models["tag"], "cpu").tag(TEXTS[0])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", screen := io.StringIO())
    encoder_tasks._print_colored(tagged, LABELS)
    text = screen.getvalue()
    assert "\x1b[" in text
    assert all(span.text in text and span.label in text for span in tagged.spans)


def test_every_entity_type_has_its_own_color(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.cli import encoder_tasks

    kinds = ["PERSON", "PLACE", "DATE", "TIME", "NUMBER", "MONEY"]
    spans = tuple(Span(kind, n, n + 1, kind, 1.0) for n, kind in enumerate(kinds))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", screen := io.StringIO())
    labels = ["O", *(f"{mark}-{kind}" for kind in sorted(kinds) for mark in "BI")]
    encoder_tasks._print_colored(Tagging("abcdef", (), spans), labels)
    assert len(set(re.findall(r"\x1b\[1;(\d+)m", screen.getvalue()))) == len(kinds)


def test_answer(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = " ".join(TEXTS) * 20
    (tmp_path / "context.txt").write_text(context, encoding="utf-8")
    rows = same_by_text_file_and_pipe(
        capsys, tmp_path, "answer", models["answer"], "--context-file", str(tmp_path / "context.txt"), "--top", "2"
    )
    expected = load(models["answer"], "cpu").answer(TEXTS, context, top=2)
    for row, best in zip(rows, expected, strict=True):
        assert [(each["start"], each["end"]) for each in row["answers"]] == [(a.start, a.end) for a in best.candidates]
        assert all(context[each["start"] : each["end"]] == each["text"] for each in row["answers"])
    line = output_of(capsys, "answer", models["answer"], "--require-answer", stdin=f"who?\t{TEXTS[0]}\n").rstrip("\n")
    text, _, span = line.split("\t")
    start, end = map(int, span.split("-"))
    assert text == TEXTS[0][start:end]


def test_a_context_file_or_pipe_is_read_verbatim(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = "\r\n".join(TEXTS) + "\r\n"
    (tmp_path / "plain.txt").write_bytes(context.encode())
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(context.encode()))
    outs = [
        output_of(
            capsys,
            "answer",
            models["answer"],
            "who?",
            "--require-answer",
            "--json",
            "--context-file",
            str(tmp_path / name),
        )
        for name in ("plain.txt", "packed.txt.gz")
    ]
    ask = ("answer", models["answer"], "who?", "--require-answer", "--json", "--context-file", "-")
    outs.append(output_of(capsys, *ask, stdin=context))
    assert outs[0] == outs[1] == outs[2]
    (answer,) = json.loads(outs[0])["answers"]
    assert context[answer["start"] : answer["end"]] == answer["text"] != ""


def test_fill(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    text = "Zoë <mask> the [MASK]."
    row = json.loads(output_of(capsys, "fill", models["fill"], text, "--json", "--top", "3"))
    assert [text[mask["start"] : mask["end"]] for mask in row["masks"]] == ["<mask>", "[MASK]"]
    plain = output_of(capsys, "fill", models["fill"], "--top", "3", stdin=text + "\n").splitlines()
    assert [len(line.split("\t")) for line in plain] == [3, 3]
    assert plain[0].startswith(row["masks"][0]["tokens"][0]["text"])
    tokens = output_of(capsys, "fill", models["fill"], "--top", "1000", "<mask>").rstrip("\n").split("\t")
    assert all(token.isprintable() for token in tokens), "bytes and control characters are replaced"


def test_embed_and_similar(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = same_by_text_file_and_pipe(capsys, tmp_path, "embed", models["embed"])
    vectors = load(models["embed"], "cpu").embed(TEXTS)
    assert np.abs(np.array([row["vector"] for row in rows]) - vectors).max() < 1e-6
    output_of(capsys, "embed", models["embed"], *TEXTS, "--out", str(tmp_path / "v.npy"))
    assert np.array_equal(np.load(tmp_path / "v.npy"), vectors)
    corpus = str(tmp_path / "texts.txt")
    rows = json.loads(output_of(capsys, "similar", models["embed"], corpus, TEXTS[1], "--top", "2", "--json"))[
        "matches"
    ]
    assert rows[0] == {"line": 2, "text": TEXTS[1], "score": pytest.approx(1.0, abs=1e-5)}
    plain = output_of(capsys, "similar", models["embed"], corpus, "--top", "2", stdin=TEXTS[1] + "\n").splitlines()
    assert [line.split("\t")[2] for line in plain] == [row["text"] for row in rows]


LONG = " ".join(["cat"] * 25_000)  # 100,000 characters


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["fill", "fill", "no gap"], "", "text 1: no mask in it; write <mask> where the word is missing"),
        (["fill", "decoder", "a [MASK]"], "", "is a decoder; it can generate and chat"),
        (["fill", "classify", "a [MASK]"], "", "was trained for classification, not for masked-language-model"),
        (["fill", "fill"], f"a [MASK]\n[MASK] {LONG}\n", "line 2: 25,001 tokens, but the model reads 46; shorten it"),
        (["classify", "classify", ""], "", "text 1: empty; give some text"),
        (["classify", "classify"], "cat\n\ncat\n", "; line 2: empty; give some text"),
        (["classify", "classify"], "cat\n" * 600 + LONG, "; line 601: 25,000 tokens, but"),
        (["classify", "pairs"], "a cat\n", "; line 1: 0 tabs; separate the two texts by one tab, or use"),
        (["classify", "classify", "a", "--text-pair", "b"], "", "reads one text; leave the second out"),
        (["classify", "embed", "a"], "", "was trained for similarity, not for classification; fine-tune it with"),
        (["tag", "tag", " "], "", "text 1: empty; give some text"),
        (["tag", "tag", LONG], "", "shorten it, or use --truncate"),
        (["answer", "answer", "who?"], "", "--context: missing; give the context of the questions"),
        (["answer", "answer", "who?", "--context", ""], "", "text 1: the context is empty; give some text"),
        (["answer", "answer", LONG, "--context", "cat"], "", "text 1: the question has 25,000 tokens"),
        (["answer", "answer", "a", "--context-file", "nowhere.txt"], "", "nowhere.txt does not exist"),
        (["answer", "answer", "a", "--context-file", "wide.txt"], "", "wide.txt: contains a zero byte; if the file"),
        (["answer", "answer", "a", "--context-file", "latin.txt"], "", "latin.txt, line 2: not valid UTF-8; save"),
        (["answer", "answer", "--context-file", "-"], "cat", "standard input can be read only once; pass - once"),
        (["embed", "embed", LONG], "", "text 1: 25,000 tokens, but the model reads 46"),
        (["embed", "embed", "a", "--out", "nowhere/x.npy"], "", "--out: cannot write nowhere/x.npy"),
        (["embed", "embed", "a", "--out", "v.txt"], "", "--out: v.txt: vectors are written as .npy, .jsonl, .csv or"),
        (["embed", "embed", "a", "--out", "v.npy.gz"], "", "--out: v.npy.gz: vectors are written as .npy, .jsonl"),
        (["embed", "embed", "a", "--pooling", "max"], "", "pooling: 'max' is not allowed; use mean or cls"),
        (["similar", "embed", "nowhere.txt", "a"], "", "nowhere.txt does not exist"),
        (["classify", "nowhere", "a"], "", "no model 'nowhere'"),
        (["evaluate", "classify", "--data", "missing.tsv", "--format", "tsv"], "", "line 2: only 1 columns, but 2"),
        (["evaluate", "classify", "--data", "stranger.tsv", "--format", "tsv"], "", "line 1: label 'X' is not in the"),
        (["evaluate", "classify", "--data", "none.tsv", "--format", "tsv"], "", "line 2: the label is missing"),
        (["evaluate", "classify", "--data", "empty.tsv", "--format", "tsv"], "", "line 2: empty; give some text"),
        (["evaluate", "tag", "--data", "bare.txt", "--format", "conll"], "", "line 2: 'dog' has no tag after"),
        (["evaluate", "tag", "--data", "odd.txt", "--format", "conll"], "", "line 2: label 'B-DOG' is not in the"),
        (["evaluate", "classify", "--data", "none.tsv", "--columns", "text"], "", "--columns: 'text' is not"),
        (["evaluate", "classify", "--data", "none.tsv", "--labels", "1=,2"], "", "--labels: '1=' is not name=value"),
        (["evaluate", "answer", "--data", "context.jsonl", "--format", "jsonl"], "", "line 1: None is NoneType, not"),
        (["evaluate", "embed", "--data", "pair.jsonl", "--format", "jsonl"], "", "line 1: 5 is int, not a text"),
        (["evaluate", "answer", "--data", "second.json", "--format", "squad"], "", "question 1: 5 is int, not a text"),
        (["evaluate", "classify", "--labels", "1=X"], "", "--labels: needs --data; name the files"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_exit_code_2(
    arguments: list[str],
    stdin: str,
    message: str,
    models: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"question": "who?", "answers": [{"text": "cat", "answer_start": 0}, {"text": 5, "answer_start": 0}]}
    for name, text in {
        "missing.tsv": "a cat\tO\na dog\n",
        "stranger.tsv": "a cat\tX\n",
        "none.tsv": "a cat\tO\na dog\t\n",
        "empty.tsv": "a cat\tO\n\tO\n",
        "bare.txt": "cat O\ndog\n",
        "odd.txt": "cat O\ndog B-DOG\n",
        "context.jsonl": json.dumps({"context": None, "question": "who?", "answer": "cat", "start": 0}),
        "pair.jsonl": json.dumps({"text": "a cat", "second": 5, "label": 1.0}),
        "second.json": json.dumps({"data": [{"paragraphs": [{"context": "cat", "qas": [asked]}]}]}),
    }.items():
        Path(name).write_text(text)
    Path("wide.txt").write_bytes("a cat".encode("utf-16"))
    Path("latin.txt").write_bytes(b"a cat\ncaf\xe9\n")
    command, model, *rest = arguments
    assert main(command, models.get(model, model), *rest, stdin=stdin) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("clearhead: ")]
    assert message in line


def test_evaluate_reads_files_in_the_format_of_the_recipe(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: Model = task_model(
        "classes", train={"format": "csv", "files": ["gone.csv"], "columns": {"text": 2, "label": 1}}
    )
    save_model(tmp_path / "model", made.network, made.tokenizers, made.extra)
    (tmp_path / "test.csv").write_text("".join(f"{LABELS[n % 5]},cat {n}\n" for n in range(20)))
    metrics = json.loads(
        output_of(capsys, "evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "test.csv"), "--json")
    )
    outputs = [result.label for result in made.classify([f"cat {n}" for n in range(20)])]
    assert metrics["texts"] == 20
    assert metrics["accuracy"] == sum(output == LABELS[n % 5] for n, output in enumerate(outputs)) / 20
    assert sum(map(sum, metrics["confusion"]["counts"])) == 20
    table = output_of(capsys, "evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "test.csv")).splitlines()
    assert table[0].split() == ["true", "predicted"]
    assert table[1].split() == [*LABELS]
    (tmp_path / "other.csv").write_text("".join(f"{n % 5 + 1},cat {n}\n" for n in range(20)))
    given = ["--labels", ",".join(f"{n}={label}" for n, label in enumerate(LABELS, start=1))]
    again = output_of(
        capsys, "evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "other.csv"), *given, "--json"
    )
    assert json.loads(again) == metrics


def test_a_missing_test_file_is_not_reported_with_the_source_url(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"format": "csv", "files": ["gone.csv"]}
    made: Model = task_model("classes", train=train, source_url="https://example.org/corpus")
    save_model(tmp_path / "model", made.network, made.tokenizers, made.extra)
    assert main("evaluate", str(tmp_path / "model"), "--data", "nowhere.csv") == 2
    errors = capsys.readouterr().err
    assert "nowhere.csv does not exist" in errors
    assert "example.org" not in errors


COMMANDS = ("fill", "classify", "tag", "answer", "embed", "similar")
ODD = ["👩‍👩‍👧 🐈", "e\u0301te\u0301", "שלום عربي", "a\rb", "a\u2028b\u0085c", '"\\ </s> [SEP]', "\u200bcat\u0301"]


def arguments_of(command: str, models: dict[str, str], folder: Path) -> tuple[str, ...]:
    """A command with all arguments except the texts."""
    (folder / "lines.txt").write_text("The cat\n", encoding="utf-8")
    more = {"answer": ("--context", "The cat"), "similar": (str(folder / "lines.txt"),)}.get(command, ())
    return (command, models["embed" if command == "similar" else command], *more)


@pytest.mark.parametrize("command", COMMANDS)
def test_unusual_texts_give_one_object_per_line(
    command: str, models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"{text} <mask>" for text in ODD] if command == "fill" else ODD
    out = output_of(
        capsys, *arguments_of(command, models, tmp_path), "--json", stdin="".join(f"{text}\n" for text in texts)
    )
    rows = [json.loads(line) for line in out.removesuffix("\n").split("\n")]
    name = {"answer": "question", "similar": "query"}.get(command, "text")
    assert [row[name] for row in rows] == texts


@pytest.mark.parametrize("command", COMMANDS)
def test_closed_standard_input_is_one_error_line(
    command: str, models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(*arguments_of(command, models, tmp_path), stdin=None) == 2
    out, errors = capsys.readouterr()
    assert (out, errors) == (
        "",
        "clearhead: standard input is closed; send the text through a pipe, or name a file\n",
    )


@pytest.mark.parametrize(("command", "name"), [("translate", "tiny-translator"), ("generate", "tiny-gpt")])
def test_closed_standard_input_is_an_error_of_generating_commands_too(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command, str(make(tmp_path / name, name)), stdin=None) == 2
    assert capsys.readouterr().err.startswith("clearhead: standard input is closed; send the text through a pipe")


def test_an_impossible_translation_is_valid_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = load(make(tmp_path / "plain", "tiny-translator"), "cpu")
    extra = plain.extra | {"banned_ids": [[number] for number in range(len(plain.tokenizer))]}
    save_model(tmp_path / "mute", plain.network, plain.tokenizers, extra)
    result = json.loads(
        output_of(capsys, "translate", str(tmp_path / "mute"), "a man", "--json"), parse_constant=pytest.fail
    )
    assert result["translations"] == [{"text": "", "score": None, "alignment": None}]
