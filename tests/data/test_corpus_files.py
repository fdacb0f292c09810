"""Which files a corpus reads: format by file name, patterns, folders of mixed files, pairs of parallel files."""

import gzip
from pathlib import Path

import pytest

from clearhead.config.data import Corpus
from clearhead.data import prepare
from clearhead.data.corpus_files import corpus_files
from clearhead.data.formats import TEXT, TRANSLATION, read_corpus
from clearhead.errors import ConfigError, UserError
from tests.data.helpers import config, prepared, tokenizer, write


@pytest.mark.parametrize(
    ("files", "format"),
    [
        ("pairs.tsv", "tsv"),
        ("a/PAIRS.TSV.GZ", "tsv"),
        ("x.tab", "tsv"),
        ("x.csv", "csv"),
        ("x.csv.gz", "csv"),
        ("x.jsonl", "jsonl"),
        ("x.ndjson.gz", "jsonl"),
        ("squad.json", "squad"),
        ("x.conll", "conll"),
        ("x.txt", "text"),
        ("x.txt.gz", "text"),
        ("novels", "text"),
        ("novels/*.csv", "csv"),
        (["a.en", "a.de.gz"], "parallel"),
        (["a.en", "a.de", "b.en", "b.de"], "parallel"),
        (["a.en", "b.en"], "text"),
        (["a.txt", "b.md"], "text"),
    ],
)
def test_the_format_follows_from_the_names_of_the_files(files: str | list[str], format: str) -> None:
    assert Corpus.build({"files": files}).format == format


def test_a_given_format_wins_over_the_names() -> None:
    assert Corpus.build({"files": ["deu.txt", "x.csv"], "format": "tsv"}).format == "tsv"


@pytest.mark.parametrize("files", [["a.csv", "b.tsv"], ["a.txt", "b.csv.gz"], ["novels", "b.jsonl"]])
def test_files_of_mixed_formats_need_a_format(files: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^corpus: files: .* are mixed; set format, or make each"):
        Corpus.build({"files": files}, where="corpus")


def test_a_pattern_stands_for_the_files_that_match_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path / "elsewhere"))
    for name in ("data/b.txt", "data/a.txt", "data/c.csv", "data/below/d.txt", "elsewhere/e.txt", "odd[1].txt"):
        write(tmp_path / name, [name])
    names = {pattern: corpus_files(Corpus(files=(pattern,))) for pattern in ("data/*.txt", "**/d.txt", "e*.txt")}
    assert [path.as_posix() for path in names["data/*.txt"]] == ["data/a.txt", "data/b.txt"]
    assert [path.as_posix() for path in names["**/d.txt"]] == ["data/below/d.txt"]
    assert names["e*.txt"] == [tmp_path / "elsewhere" / "e.txt"]  # below CLEARHEAD_DATA
    assert corpus_files(Corpus(files=("odd[1].txt",))) == [Path("odd[1].txt")]  # a file of that very name
    with pytest.raises(UserError, match=r"^data/\*\.tsv: no file matches this pattern"):
        corpus_files(Corpus(files=("data/*.tsv",)))


def test_patterns_of_parallel_files_are_paired(tmp_path: Path) -> None:
    for name in ("1.en", "2.en", "1.de", "2.de"):
        write(tmp_path / name, [name])
    corpus = Corpus.build({"files": [f"{tmp_path}/*.en", f"{tmp_path}/*.de"]})
    pairs = [record.values for record in read_corpus(corpus, TRANSLATION)]
    assert pairs == [("1.en", "1.de"), ("2.en", "2.de")]
    (tmp_path / "2.de").unlink()
    with pytest.raises(UserError, match=r"\*\.en has 2 files and .*\*\.de has 1; parallel needs pairs"):
        corpus_files(corpus)


def test_a_folder_of_mixed_files_gives_those_of_the_format_and_counts_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    for name in ("b.txt", "a.md", "noname", "table.csv"):
        write(folder / name, ["the cat sat on the mat"] * 9)
    (folder / "c.txt.gz").write_bytes(gzip.compress("Ä cat\n".encode()))
    (folder / "long").write_bytes(b"x" * 4095 + "Ä cat\n".encode())  # a character at the end of what is looked at
    (folder / "cover.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (folder / "old.doc").write_bytes("Ä".encode("latin-1") * 100)
    corpus = Corpus(files=(str(folder),))
    assert [path.name for path in corpus_files(corpus)] == ["a.md", "b.txt", "c.txt.gz", "long", "noname"]
    assert [path.name for path in corpus_files(Corpus(files=(str(folder),), format="csv"))][-1] == "table.csv"
    lines: list[str] = []
    settings = config(tmp_path, "language-model", train={"files": str(folder)}, max_length=8)
    prepare(settings, [tokenizer()], log=lines.append)
    assert f"{folder}: 5 text files; left out: 3 others (cover.png, old.doc, table.csv)" in lines


def test_a_folder_without_a_file_of_the_format_says_what_it_has(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", ["x,y"])
    with pytest.raises(UserError, match=r"has no text files, only \.csv; name the files, or set format"):
        list(read_corpus(Corpus(files=(str(tmp_path),)), TEXT))


def test_a_damaged_file_in_a_folder_is_an_error_and_not_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a", ["text"])
    (tmp_path / "b").write_bytes(gzip.compress(b"text\n" * 99)[:20])
    with pytest.raises(UserError, match="truncated or damaged"):
        list(read_corpus(Corpus(files=(str(tmp_path),)), TEXT))


def test_a_missing_validation_file_is_reported_before_the_training_data_is_tokenized(tmp_path: Path) -> None:
    train = {"files": write(tmp_path / "a.txt", ["the cat"] * 99)}
    with pytest.raises(UserError, match=r"gone\.txt does not exist"):
        prepared(tmp_path, "language-model", train=train, valid={"files": "gone.txt"}, max_length=8)
    assert not (tmp_path / "cache" / "tokens").exists()
