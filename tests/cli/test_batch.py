"""Tables by column, output files, warnings about unfamiliar texts: the commands for many texts."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from clearhead.checkpoint import save_model
from clearhead.predict import Model, load
from tests.cli.forked import calls
from tests.cli.models import make
from tests.predict.task_models import task_model

REVIEWS = [["1", "a cat, a dog", "good"], ["2", "", "bad"], ["3", 'the "cat"\nsat', "good"]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    make(folder / "tr", "tiny-translator")
    make(folder / "gpt", "tiny-gpt")
    made = {
        "classify": task_model("classes"),
        "pairs": task_model("classes", text_pairs=True),
        "tag": task_model("tags"),
    }
    for name, model in (made | {"embed": task_model(""), "answer": task_model("span")}).items():
        save_model(folder / name, model.network, model.tokenizers, model.extra)
    with (folder / "reviews.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "review", "label"], *REVIEWS])
    return folder


def run(folder: Path, *commands: str) -> list[tuple[int, str, str]]:
    """Run commands without input."""
    return calls([(command.split(), b"") for command in commands], folder)


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_table_keeps_its_columns_and_gets_the_results(models: Path) -> None:
    command = "classify classify --file reviews.csv --column review"
    stdout, as_file, as_json, skipped, _ = run(
        models,
        command,
        f"{command} --out labeled.csv",
        f"{command} --json",
        f"{command} --on-error skip --out labeled.jsonl",
        f"{command} --out labeled.tsv.gz",
    )
    assert all(code == 2 and "1 of 3 lines failed" in errors for code, _, errors in (stdout, as_file, as_json, skipped))
    expected = load(models / "classify", "cpu").classify([REVIEWS[0][1], REVIEWS[2][1]])
    header, first, marked, last = rows_of(models / "labeled.csv")
    assert header == ["id", "review", "label", "predicted_label", "score"]
    assert [first[:4], last[:4]] == [[*REVIEWS[n], expected[n // 2].label] for n in (0, 2)]
    assert float(first[4]) == pytest.approx(expected[0].score, abs=1e-5)
    assert marked == ["2", "", "bad", "", ""]
    assert stdout[1] == (models / "labeled.csv").read_text()
    objects = [json.loads(line) for line in as_json[1].splitlines()]
    assert [row["predicted_label"] for row in objects] == [expected[0].label, None, expected[1].label]
    assert objects[1]["error"] == "empty; give some text"
    assert {name: objects[2][name] for name in header[:3]} == dict(zip(header, REVIEWS[2], strict=False))
    assert [json.loads(line)["id"] for line in (models / "labeled.jsonl").read_text().splitlines()] == ["1", "3"]
    packed = gzip.decompress((models / "labeled.tsv.gz").read_bytes()).decode().splitlines()
    assert packed[3].split("\t")[:3] == ["3", 'the "cat" sat', "good"]


def test_every_command_reads_json_lines_and_tsv_by_column(models: Path) -> None:
    texts = ["the dog", "a man sees the dog"]
    (models / "in.jsonl").write_text("".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    (models / "in.tsv").write_text("n\ttext\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(texts)))
    commands = {
        "translate tr --beam 1": ["translation"],
        "generate gpt --max-new-tokens 3": ["generated", "finished"],
        "classify classify": ["label", "score"],
        "tag tag": ["spans", "words"],
        "embed embed": ["vector"],
        "answer answer --column text --context cat": ["answer", "score", "start", "end"],
    }
    results = run(models, *(f"{command} --file {name}" for command in commands for name in ("in.jsonl", "in.tsv")))
    for number, (command, columns) in enumerate(commands.items()):
        (code, objects, errors), (code2, table, _) = results[2 * number : 2 * number + 2]
        assert (code, code2) == (0, 0), errors
        rows = [json.loads(line) for line in objects.splitlines()]
        assert [list(row) for row in rows] == [["n", "text", *columns]] * 2, command
        header, *cells = [line.split("\t") for line in table.splitlines()]
        assert header == ["n", "text", *columns]
        assert [row[:2] for row in cells] == [[str(n), text] for n, text in enumerate(texts)]
        if isinstance(rows[0][columns[0]], str):
            assert [row[2] for row in cells] == [" ".join(row[columns[0]].splitlines()) for row in rows]


def test_two_columns_and_columns_by_number(models: Path) -> None:
    (models / "pairs.csv").write_text("a cat,x,a dog\nthe cat,y,the dog\n")
    (code, output, errors), (code2, lines, _) = calls(
        [
            (["classify", "pairs", "--file", "pairs.csv", "--column", "1,3"], b""),
            (["classify", "pairs", "--json"], b"a cat\ta dog\nthe cat\tthe dog\n"),
        ],
        models,
    )
    assert (code, code2) == (0, 0), errors
    model: Model = load(models / "pairs", "cpu")
    labels = [each.label for each in model.classify(["a cat", "the cat"], ["a dog", "the dog"])]
    rows = list(csv.reader(output.splitlines()))
    assert [row[:4] for row in rows] == [["a cat", "x", "a dog", labels[0]], ["the cat", "y", "the dog", labels[1]]]
    assert json.loads(lines.splitlines()[0])["second"] == "a dog"


ERRORS = {
    "translate tr --file reviews.csv --column title": "reviews.csv: no column 'title'; known: id, label, review",
    "translate tr --file names.csv": "names.csv: which column holds the text? the first line has a, b; give it",
    "translate tr --file names.csv --column a,b": "--column: 'a,b' is not the text; write TEXT",
    "translate tr --file data.json": "data.json: the name says squad, which is not read here",
    "translate tr --column text": "--column: plain text has no columns; give --format csv, tsv or jsonl",
    "translate tr --format cvs": "--format: 'cvs' is not allowed; did you mean csv?",
    "translate tr hello --on-error ignore": "--on-error: 'ignore' is not allowed; known: mark, skip, stop",
    "translate tr --file reviews.csv --out reviews.csv": "--out: reviews.csv already exists; choose another",
    "embed embed a --out reviews.csv": "--out: reviews.csv already exists; choose another name, or replace it",
    "translate tr a --out x.json": "--out: x.json: results are written as .csv, .tsv, .jsonl or plain lines",
    "embed embed": "standard input: empty; give one text per line",
    "similar embed empty.txt a": "empty.txt: empty; give a file with one text per line",
    "generate gpt hello --file reviews.csv": "--file: given together with a PROMPT",
    "translate tr --file quotes.csv --column a": "quotes.csv, line 2: unexpected end of data; check the quotation",
}


def test_errors_say_what_to_do(models: Path) -> None:
    (models / "names.csv").write_text("a,b\n1,2\n")
    (models / "quotes.csv").write_text('a,b\n"1,2\n')
    (models / "empty.txt").write_text("")
    for (command, message), (code, _, errors) in zip(ERRORS.items(), run(models, *ERRORS), strict=True):
        assert (code, errors.count("\n")) == (2, 1), (command, errors)
        assert message in errors
    assert not (models / "x.json").exists()


def test_bad_rows_are_marked_and_counted(models: Path) -> None:
    long = "dog " * 200
    (models / "rows.csv").write_text(f"n,text\n1,the dog\n2\n3,{long}\n4,a,b\n5,the dog\n")
    (models / "rows.jsonl").write_text('{"text": "the dog"}\nno\n{"text": 5}\n{"n": 1}\n{"text": "the dog"}\n')
    results = run(models, "translate tr --beam 1 --file rows.csv --json", "translate tr --beam 1 --file rows.jsonl")
    for (code, output, errors), line in zip(results, (3, 2), strict=True):
        rows = [json.loads(line) for line in output.splitlines()]
        assert [row["translation"] is None for row in rows] == [False, True, True, True, False]
        assert [("error" in row) for row in rows] == [False, True, True, True, False]
        assert code == 2
        assert f"3 of 5 lines failed, left empty in the output; line {line}: " in errors
        assert f"; also lines {line + 1}, {line + 2}" in errors


def test_vectors_are_written_as_they_come_and_failed_ones_are_nan(models: Path) -> None:
    (models / "texts.txt").write_text("cat\n\ndog\n" * 400)
    (code, _, errors), (again, _, refused), (forced, _, _) = run(
        models,
        "embed embed --file texts.txt --out v.npy",
        "embed embed cat --out v.npy",
        "embed embed cat --out one.npy",
    )
    assert code == 2
    assert "400 of 1,200 lines failed" in errors
    vectors = np.load(models / "v.npy")
    expected = load(models / "embed", "cpu").embed(["cat", "dog"])
    assert vectors.shape == (1200, expected.shape[1])
    assert np.abs(vectors[::3] - expected[0]).max() < 1e-6
    assert np.isnan(vectors[1::3]).all()
    assert (again, forced) == (2, 0)
    assert "--out: v.npy already exists" in refused


def test_search_skips_lines_that_cannot_be_used(models: Path) -> None:
    (models / "search.csv").write_text("n,text\n1,cat\n2,\n3,dog\n")
    [(code, output, errors)] = run(models, "similar embed search.csv dog --top 1 --json")
    assert json.loads(output) == {"query": "dog", "matches": [{"line": 4, "text": "dog", "score": pytest.approx(1.0)}]}
    assert code == 2
    assert "search.csv: 1 of 3 lines failed, left out; line 3: empty" in errors


def test_unfamiliar_texts_are_counted_in_one_warning(models: Path) -> None:
    hardly = "which this model's tokenizer hardly knows; expect nonsense"
    unknown = "mostly words or characters that this model's tokenizer does not know"
    warnings = {
        "the dog sees a man": "",
        "zzyzx qwfp": unknown,
        "Собака видит человека": f"Cyrillic letters, {hardly}",
        "狗看见一个人": f"Chinese characters, {hardly}",
        "5 + 5 = 10; π": unknown,  # a letter is not a script
    }
    arguments = ["translate", "tr", "--beam", "1"]
    results = calls([(arguments, f"the dog\n{text}\n{text}\n".encode()) for text in warnings], models)
    for warning, (code, output, errors) in zip(warnings.values(), results, strict=True):
        assert (code, output.count("\n")) == (0, 3)
        assert errors == (f"warning: standard input: 2 of 3 lines: {warning}\n" if warning else "")


def test_a_column_number_that_the_first_line_lacks_stops_before_any_output(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("1,good\n2,bad\n", encoding="utf-8")
    arguments = ["translate", "en-de", "--file", "in.csv", "--column", "9", "--out", "out.csv"]
    [(code, _, errors)] = calls([(arguments, b"")], tmp_path)
    assert (code, errors) == (2, "clearhead: in.csv: no column 9; the first line has 2, counted from 1\n")
    assert not (tmp_path / "out.csv").exists()


def test_a_quote_that_is_never_closed_is_reported_where_it_opens(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('text\nok\n"open\nmore\n', encoding="utf-8")
    arguments = ["translate", "en-de", "--file", "in.csv", "--column", "text"]
    [(code, _, errors)] = calls([(arguments, b""), (["new", "in.csv"], b"")], tmp_path)[:1]
    assert code == 2
    assert "in.csv, line 3: unexpected end of data" in errors
