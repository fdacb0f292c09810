"""`clearhead new`: the task guessed for files of each kind and a recipe that trains; data in place of a recipe."""

import csv
import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead import cli
from clearhead.config.load import read_yaml
from clearhead.config.recipe import load_recipe
from clearhead.data.grammar import Grammar
from clearhead.errors import ConfigError
from clearhead.train.dry_run import dry_run

EXAMPLES = [Grammar(level=1).example("train", n) for n in range(90)]
EN, DE, ZH = ([example.text(language) for example in EXAMPLES] for language in ("en", "de", "zh"))  # type: ignore[arg-type]
LABELS = ["good" if n % 3 else "bad" for n in range(len(EN))]
TOKENS = [sentence.rstrip(".?").split() for sentence in EN]
TAGS = [["B-NAME" if word[0].isupper() else "O" for word in sentence] for sentence in TOKENS]


def table(*columns: list[object], header: str = "", delimiter: str = ",") -> str:
    text = io.StringIO()
    rows = [header.split()] * bool(header) + [list(row) for row in zip(*columns, strict=True)]
    if delimiter == "\t":
        return "".join("\t".join(map(str, row)) + "\n" for row in rows)
    csv.writer(text).writerows(rows)
    return text.getvalue()


def objects(**columns: list[object]) -> str:
    return "".join(
        json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n"
        for row in zip(*columns.values(), strict=True)
    )


def conll() -> str:
    return "\n\n".join("\n".join(map(" ".join, zip(*pair, strict=True))) for pair in zip(TOKENS, TAGS, strict=True))


def squad() -> str:
    paragraphs = [
        {
            "context": text,
            "qas": [{"id": str(n), "question": "What?", "answers": [{"text": text[:3], "answer_start": 0}]}],
        }
        for n, text in enumerate(EN)
    ]
    return json.dumps({"data": [{"title": str(n), "paragraphs": [each]} for n, each in enumerate(paragraphs)]})


NUMBERS = list(range(len(EN)))
SCORES = [n % 11 / 2 for n in NUMBERS]
CLASSIFY = "classification"
CASES: dict[str, tuple[dict[str, str], str, str]] = {
    # case: files, task, columns
    "pairs": ({"pairs.tsv": table(EN, DE, delimiter="\t")}, "translation", "source=1 target=2"),
    "tatoeba": ({"deu.txt": table(EN, DE, NUMBERS, delimiter="\t")}, "translation", "source=1 target=2"),
    "named": ({"x.csv": table(NUMBERS, EN, ZH, header="id en zh")}, "translation", "source=en target=zh"),
    "parallel": ({"train.en": "\n".join(EN), "train.de": "\n".join(DE)}, "translation", ""),
    "two files": ({"a.txt": "\n".join(EN), "b.txt": "\n".join(DE)}, "translation", ""),
    "reviews": ({"a b.csv": table(EN, LABELS, header="review sentiment")}, CLASSIFY, "text=review label=sentiment"),
    "no header": ({"x.tsv": table(LABELS, EN, delimiter="\t")}, CLASSIFY, "text=2 label=1"),
    "few sentences": (
        {"x.csv": table([EN[n % 18] for n in NUMBERS], LABELS, header="review mood")},
        CLASSIFY,
        "text=review label=mood",
    ),
    "few Chinese sentences": ({"x.csv": table([ZH[n % 29] for n in NUMBERS], LABELS)}, CLASSIFY, "text=1 label=2"),
    "digits": ({"x.csv": table(EN, [n % 2 for n in NUMBERS])}, CLASSIFY, "text=1 label=2"),
    "with ids": ({"x.csv": table(NUMBERS, EN, LABELS, header="id text label")}, CLASSIFY, "text=text label=label"),
    "objects": ({"x.jsonl": objects(text=ZH, label=LABELS)}, CLASSIFY, "text=text label=label"),
    "empty cells": ({"x.tsv": table(LABELS, ["", "*", "?"] * 30, EN, delimiter="\t")}, CLASSIFY, "text=3 label=1"),
    "text pairs": ({"x.csv": table(EN, EN[::-1], LABELS, header="a b y")}, CLASSIFY, "text=a second=b label=y"),
    "similarity": ({"x.csv": table(EN, EN[::-1], SCORES)}, "similarity", "text=1 second=2 label=3"),
    "rating": ({"x.csv": table(EN, SCORES, header="text score")}, "regression", "text=text label=score"),
    "conll": ({"x.conll": conll()}, "tagging", ""),
    "conll text": ({"ner.txt": conll()}, "tagging", ""),
    "token lists": ({"x.jsonl": objects(tokens=TOKENS, tags=TAGS)}, "tagging", "tokens=tokens tags=tags"),
    "text": ({"novel.txt": "\n".join(EN)}, "language-model", ""),
    "chinese": ({"novel.txt": "\n".join(ZH)}, "language-model", ""),
    "one column": ({"x.jsonl": objects(body=EN)}, "language-model", "text=body"),
    "squad": ({"x.json": squad()}, "answering", ""),
}  # fmt: skip

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clearhead", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output, errors = capsys.readouterr()
        return int(ended.value.code or 0), output, errors

    return call


@pytest.mark.parametrize("case", CASES)
def test_the_recipe_has_the_right_task_and_columns_and_trains(case: str, run: Run) -> None:
    files, task, columns = CASES[case]
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    code, output, errors = run("new", *files, "--out", "mine.yaml")
    assert (code, errors) == (0, "")
    assert f"task     {task}: " in output
    recipe = load_recipe("mine.yaml")
    assert recipe.data.task == task
    assert " ".join(f"{name}={column}" for name, column in recipe.data.train[0].columns.items()) == columns
    assert recipe.data.text_pairs == (case == "text pairs")
    few = load_recipe("mine.yaml", ["data.batch_tokens=512"])
    lines = dry_run(few, lambda line: None)
    assert any(line.startswith("# validation    loss") for line in lines)
    text = Path("mine.yaml").read_text(encoding="utf-8")
    assert all("#" in line or line.endswith(":") or "train: {" in line for line in text.splitlines()), "commented"


def test_scores_are_a_fraction_of_the_highest(run: Run) -> None:
    Path("x.csv").write_text(CASES["similarity"][0]["x.csv"])
    run("new", "x.csv")
    assert load_recipe("x.yaml").data.max_score == 5


def test_gzip_files_and_folders_are_guessed_too(run: Run) -> None:
    Path("novels").mkdir()
    for n in range(2):
        Path(f"novels/{n}.txt.gz").write_bytes(gzip.compress("\n".join(EN[n::2]).encode()))
    Path("novels/cover.png").write_bytes(b"\x89PNG\0")
    assert run("new", "novels")[0] == 0
    assert load_recipe("novels.yaml").data.task == "language-model"
    Path("t.tsv.gz").write_bytes(gzip.compress(table(EN, DE, delimiter="\t").encode()))
    assert run("new", "t.tsv.gz")[0] == 0
    assert load_recipe("t.yaml").data.task == "translation"


def test_a_recipe_is_not_overwritten_without_force(run: Run) -> None:
    Path("x.csv").write_text(table(EN, LABELS))
    Path("x.yaml").write_text("mine")
    code, _, errors = run("new", "x.csv")
    assert (code, errors) == (
        2,
        "clearhead: --out: x.yaml already exists; choose another name, or replace it with --force\n",
    )
    assert Path("x.yaml").read_text() == "mine"
    assert run("new", "x.csv", "--force")[0] == 0
    assert "classification" in Path("x.yaml").read_text()


def test_data_in_place_of_a_recipe_prints_a_recipe_and_the_commands(run: Run) -> None:
    Path("my pairs.tsv").write_text(table(EN, DE, delimiter="\t"))
    code, output, errors = run("train", "my pairs.tsv")
    assert code == 2
    assert errors == (
        "clearhead: my pairs.tsv is data, not a recipe; save the recipe above with: clearhead new 'my pairs.tsv'\n"
        "clearhead: then train with: clearhead train my-pairs.yaml\n"
    )
    assert run("new", "my pairs.tsv")[0] == 0
    assert Path("my-pairs.yaml").read_text() == output
    assert read_yaml(output, "recipe")["data"]["task"] == "translation"
    with pytest.raises(ConfigError, match=r"^my pairs\.tsv is data, not a recipe; write a recipe .*clearhead new"):
        load_recipe("my pairs.tsv")


@pytest.mark.parametrize(
    ("arguments", "files", "message"),
    [
        (["train", "gone.csv"], {}, "gone.csv does not exist; give a recipe, or write one for your data with"),
        (["new", "gone.csv"], {}, "gone.csv does not exist; check the path, put it under data/gone.csv"),
        (["new", "empty.csv"], {"empty.csv": ""}, "empty.csv has no records; give a file with content"),
        (["new", "empty.txt"], {"empty.txt": "\n"}, "empty.txt is empty; give a file with content"),
        (["new", "x.csv"], {"x.csv": "a;b\nc;d\n"}, "x.csv: only one column; if another sign than a comma"),
        (["new", "x.csv"], {"x.csv": "1,2\n3,4\n"}, "x.csv: no column has texts"),
        (
            ["new", "x.csv"],
            {"x.csv": "good product,yes\nbad product now,no\n" * 9},
            "x.csv: no column has texts: column 1 has only 2 different values in 18 rows, like labels; if they are",
        ),
        (["new", "x.csv"], {"x.csv": '"a,b\n'}, "x.csv, line 1: unexpected end of data; check the quotation marks"),
        (["new", "x.jsonl"], {"x.jsonl": "{]\n"}, "x.jsonl, line 1: not valid JSON"),
        (["new", "x.jsonl"], {"x.jsonl": "[1]\n"}, "x.jsonl, line 1: not an object; write one object per line"),
        (["new", "x.csv", "y.tsv"], {"x.csv": "a", "y.tsv": "b"}, "files: .csv and .tsv are mixed; set format"),
        (["new", "x.txt"], {"x.txt": "a\0b"}, "x.txt, line 1: contains a zero byte"),
    ],
)
def test_what_cannot_be_guessed_is_one_line(
    arguments: list[str], files: dict[str, str], message: str, run: Run
) -> None:
    for name, text in files.items():
        Path(name).write_text(text)
    code, _, errors = run(*arguments)
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1


def test_a_wrong_model_leaves_no_recipe(run: Run) -> None:
    Path("reviews.csv").write_text(table(EN, LABELS, header="review sentiment"))
    code, _, errors = run("train", "reviews.csv", "--from", "WRONG")
    assert code == 2
    assert errors.startswith("clearhead: no model 'WRONG'")
    assert not Path("reviews.yaml").exists()


def test_a_table_fine_tunes_a_model_in_one_command(run: Run) -> None:
    settings = ["train.steps=2", "train.device=cpu", "data.batch_tokens=512"]
    assert run("train", "mini-bert", *settings, "model.encoder_layers=1", "--out", "base")[0] == 0
    Path("reviews.csv").write_text(table(EN, LABELS, header="review sentiment"))
    lora = ["train.lora.rank=2", *settings]
    code, _, errors = run("train", "reviews.csv", "--from", "base", *lora)
    assert code == 0, errors
    recipe = load_recipe("reviews.yaml")
    assert (recipe.model["init_from"], recipe.data.task) == ("base", CLASSIFY)
    code, output, errors = run("train", "reviews.csv", "--from", "base", *lora, "--out", "again")
    assert code == 0, errors
    assert output == "recipe   reviews.yaml, written earlier; delete it to write a new one for reviews.csv\n"
    Path("b").mkdir()
    Path("b/reviews.csv").write_text(table(EN, LABELS, header="review sentiment"))
    code, _, errors = run("train", "b/reviews.csv", "--from", "base", *lora, "--out", "b/run")
    assert code == 2
    assert errors.startswith(
        "clearhead: reviews.yaml, written earlier, is for other data than b/reviews.csv; delete it"
    )
    code, _, errors = run("train", "reviews.csv", "--from", "runs/reviews", *lora, "--out", "other")
    assert (code, errors) == (
        2,
        "clearhead: --from: reviews.yaml, written earlier, has init_from base, not runs/reviews; "
        "delete it, or train it with: clearhead train reviews.yaml\n",
    )
    assert not Path("other").exists()
    assert "bad" in run("classify", "runs/reviews", "a dull film", "--json")[1]
    assert "lora" in Path("runs/reviews/recipe.yaml").read_text()
    assert run("new", "reviews.csv", "--from", "minilm", "--out", "other.yaml")[0] == 0
    assert load_recipe("other.yaml").model == {"init_from": "minilm"}
