"""Every format with what real files have: gzip, byte order marks, Windows line ends, quotes, blank lines."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from clearhead.config.data import Corpus, DataConfig
from clearhead.data import synthetic
from clearhead.data.cleaning import Cleaner
from clearhead.data.corpus_files import find_file
from clearhead.data.formats import (
    ANSWERS,
    ANSWERS_WITH_REFERENCES,
    PAIR,
    TAGS,
    TEXT,
    TRANSLATION,
    read_corpus,
)
from clearhead.errors import UserError
from tests.corpora import corpus as corpus_path

LABELED = (*TEXT, "label")
MRPC = {"text": "#1 String", "second": "#2 String", "label": "Quality"}


def values(path: Path, format: str, reads: tuple[str, ...], **settings: Any) -> list[tuple[Any, ...]]:
    """Return the values of all records of one file."""
    return [record.values for record in read_corpus(Corpus(format=format, files=(str(path),), **settings), reads)]  # type: ignore[arg-type]


def lines_of(path: Path, format: str, columns: tuple[str, ...]) -> list[Any]:
    return [record.location.number for record in read_corpus(Corpus(format=format, files=(str(path),)), columns)]  # type: ignore[arg-type]


@pytest.fixture(params=["plain", "gzip"])
def write_file(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    def write(content: str | bytes) -> Path:
        data = content.encode() if isinstance(content, str) else content
        path = tmp_path / "file"
        path.write_bytes(gzip.compress(data, mtime=0) if request.param == "gzip" else data)
        return path

    return write


def test_plain_text_drops_line_ends_and_byte_order_mark(write_file: Any) -> None:
    path = write_file(b"\xef\xbb\xbfone\r\n  two \r\n\r\n\xe7\x8c\xab\xe2\x80\xa8x")
    assert values(path, "text", TEXT) == [("one",), ("  two ",), ("",), ("猫\u2028x",)]


def test_parallel_files_are_paired_line_by_line(write_file: Any, tmp_path: Path) -> None:
    source, target = write_file("a\nb\n"), tmp_path / "target"
    target.write_text("A\nB\n")
    corpus = Corpus(format="parallel", files=(str(source), str(target), str(target), str(source)))
    records = list(read_corpus(corpus, TRANSLATION))
    assert [record.values for record in records] == [("a", "A"), ("b", "B"), ("A", "a"), ("B", "b")]
    assert [str(record.location) for record in records[1:3]] == [f"{source}, line 2", f"{target}, line 1"]


def test_tsv_has_no_quoting(write_file: Any) -> None:
    path = write_file('"bare\tsay "hi"\t1\r\n\'x\t""\t0\r\n')
    assert values(path, "tsv", (*PAIR, "label")) == [('"bare', 'say "hi"', "1"), ("'x", '""', "0")]


def test_csv_has_quoted_commas_quotes_and_newlines(write_file: Any) -> None:
    path = write_file('"a, b","say ""hi""",1\r\n\r\n"two\nlines",x,0\r\n')
    assert values(path, "csv", (*PAIR, "label")) == [("a, b", 'say "hi"', "1"), ("two\nlines", "x", "0")]


@pytest.mark.parametrize(
    ("format", "content"), [("tsv", "\na cat\tX\n\na dog\tY\n\n"), ("trec", "\nX:x a cat\n\nY:y a dog\n\n")]
)
def test_blank_lines_are_not_records(write_file: Any, format: str, content: str) -> None:
    assert values(write_file(content), format, LABELED) == [("a cat", "X"), ("a dog", "Y")]
    assert lines_of(write_file(content), format, LABELED) == [2, 4]


def test_conll_accepts_whitespace_tokens_and_trailing_tabs(write_file: Any) -> None:
    path = write_file("Berlin\tB-LOC\t\n\u00a0\tO\nis\tO \n\t\nx\tO\n")
    assert values(path, "conll", TAGS) == [(["Berlin", "\u00a0", "is"], ["B-LOC", "O", "O"]), (["x"], ["O"])]


def test_rename_maps_labels_and_tags(write_file: Any) -> None:
    names = Corpus.build({"files": ["x"], "rename": {1: "World", "b": 2}}).rename  # YAML reads 1 as a number
    assert values(write_file("a\t1\n1\tb\nc\tc\n"), "tsv", LABELED, rename=names) == [
        ("a", "World"),
        ("1", "2"),
        ("c", "c"),
    ]
    assert values(write_file('{"text": "a", "label": 1}\n'), "jsonl", LABELED, rename=names) == [("a", "World")]
    assert values(write_file("1 b\nx O\n"), "conll", TAGS, rename=names) == [(["1", "x"], ["2", "O"])]


@pytest.mark.parametrize("format", ["tsv", "csv"])
def test_columns_by_number_by_name_and_from_the_end(write_file: Any, format: str) -> None:
    separator = "\t" if format == "tsv" else ","
    path = write_file("\n".join(separator.join(row) for row in (["id", "label", "text"], ["7", "yes", "fine"])))
    by_name = {"text": "text", "label": "label"}
    assert values(path, format, LABELED, columns=by_name) == [("fine", "yes")]
    assert values(path, format, LABELED, columns={"text": 3, "label": 2}, header=True) == [("fine", "yes")]
    assert values(path, format, LABELED, columns={"text": -1, "label": "label"}) == [("fine", "yes")]
    assert values(path, format, LABELED, columns={"text": -1, "label": 1}) == [("text", "id"), ("fine", "7")]
    assert values(path, format, LABELED, header=True) == [("7", "yes")]
    assert values(path, format, LABELED) == [("id", "label"), ("7", "yes")]


def test_json_lines_skip_but_count_blank_lines(write_file: Any) -> None:
    path = write_file('{"text": "a", "label": 1}\n\n  \n{"label": "x", "text": "b", "more": []}\n')
    assert values(path, "jsonl", LABELED) == [("a", 1), ("b", "x")]
    assert values(path, "jsonl", LABELED, columns={"text": "label", "label": "text"}) == [(1, "a"), ("x", "b")]
    assert lines_of(path, "jsonl", LABELED) == [1, 4]


def test_conll_sentences_end_at_blank_lines_and_docstart(write_file: Any) -> None:
    first, second = "EU NNP B-NP B-ORG\nrejects VBZ B-VP O\n", "Peter B-PER\nNew York\tO\n"
    path = write_file(f"-DOCSTART- -X- O O\n\n{first}\n\n-DOCSTART- O\n{second}")
    assert values(path, "conll", TAGS) == [(["EU", "rejects"], ["B-ORG", "O"]), (["Peter", "New York"], ["B-PER", "O"])]
    assert lines_of(path, "conll", TAGS) == [3, 8]
    wide = write_file("EU NNP B-NP B-ORG\n")
    assert values(wide, "conll", TAGS, columns={"tags": 2}) == [(["EU"], ["NNP"])]
    assert values(wide, "conll", TAGS, columns={"tokens": 2, "tags": -2}) == [(["NNP"], ["B-NP"])]


def test_squad_gives_the_first_answer_or_none(write_file: Any) -> None:
    questions = [
        {
            "id": "q1",
            "question": "who?",
            "answers": [{"text": "Bob", "answer_start": 0}, {"text": "x", "answer_start": 9}],
        },
        {"id": "q2", "question": "why?", "is_impossible": True, "answers": [], "plausible_answers": [{"text": "Bob"}]},
        {"id": "q3", "question": "when?", "is_impossible": False, "answers": [{"text": "now", "answer_start": 8}]},
    ]
    path = write_file(json.dumps({"data": [{"paragraphs": [{"context": "Bob ran now", "qas": questions}]}]}, indent=1))
    records = list(read_corpus(Corpus(format="squad", files=(str(path),)), ANSWERS))
    context = "Bob ran now"
    expected = [(context, "who?", "Bob", 0), (context, "why?", "", 0), (context, "when?", "now", 8)]
    assert [record.values for record in records] == expected
    assert str(records[1].location) == f"{path}, question q2"


def test_files_are_located_as_given_or_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path))
    assert find_file("corpus.txt") == tmp_path / "corpus.txt"
    monkeypatch.delenv("CLEARHEAD_DATA")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "other.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert find_file("other.txt") == Path("data/other.txt")
    with pytest.raises(UserError, match=r"none\.txt does not exist; .*CLEARHEAD_DATA.*; it is published at there"):
        find_file("none.txt", "there")
    for bad_name in ("x" * 5000, "nul\0nul"):
        with pytest.raises(UserError, match="does not exist"):
            find_file(bad_name)
    with pytest.raises(UserError, match="standard input"):
        find_file("-")


def test_a_folder_means_its_files_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "below").mkdir()
    assert values(tmp_path, "text", TEXT) == [("a.txt",), ("b.txt",)]
    with pytest.raises(UserError, match="below is an empty folder; give a file, or a folder with files"):
        values(tmp_path / "below", "text", TEXT)
    (tmp_path / "below" / "c").write_text("c\n")
    folders = Corpus(format="parallel", files=(str(tmp_path), str(tmp_path / "below")))
    with pytest.raises(UserError, match=r"has 2 files and .*below has 1; parallel needs pairs of a source"):
        list(read_corpus(folders, TRANSLATION))


@pytest.mark.parametrize("order", ["copy", "reverse"])
def test_symbols_are_copied_or_reversed_and_splits_are_disjoint(order: str) -> None:
    sources = {}
    for split in ("train", "valid", "test"):
        corpus = Corpus(format="symbols", count=200, order=order, symbols=30, split=split, min_length=2, max_length=5)  # type: ignore[arg-type]
        rows = [record.values for record in synthetic.records(corpus, TRANSLATION)]
        assert rows == [record.values for record in synthetic.records(corpus, TRANSLATION)]
        for source, target in rows:
            symbols = source.split()
            assert 2 <= len(symbols) <= 5
            assert all(0 <= int(symbol) < 30 for symbol in symbols)
            assert target.split() == (symbols if order == "copy" else symbols[::-1])
        assert {len(source.split()) for source, _ in rows} == {2, 3, 4, 5}
        sources[split] = {source for source, _ in rows}
        assert len(rows) == 200
    assert not sources["train"] & sources["valid"]
    assert not sources["valid"] & sources["test"]
    assert not sources["train"] & sources["test"]
    other = Corpus(format="symbols", count=5, seed=1)
    assert [r.values for r in synthetic.records(other, TRANSLATION)] != [
        r.values for r in synthetic.records(Corpus(format="symbols", count=5), TRANSLATION)
    ]
    assert all(symbol.isalpha() for r in synthetic.records(other, TRANSLATION) for symbol in r.values[0].split())


def test_a_split_that_symbols_cannot_fill_is_an_error() -> None:
    corpus = Corpus(format="symbols", symbols=2, min_length=1, max_length=1, split="test", count=1 << 40)
    with pytest.raises(UserError, match="too few sequences for the split test; use more symbols"):
        list(synthetic.records(corpus, TRANSLATION))


@pytest.mark.parametrize(
    ("file", "format", "reads", "settings", "count"),
    [
        ("mrpc/msr_paraphrase_train.txt.gz", "tsv", (*PAIR, "label"), {"columns": MRPC}, 4076),
        ("stsb/stsb-en-dev.csv.gz", "csv", (*PAIR, "label"), {}, 1500),
        ("sst2/dev.tsv.gz", "tsv", LABELED, {"header": True}, 6735),
        ("cola/in_domain_dev.tsv", "tsv", LABELED, {"columns": {"text": 4, "label": 2}}, 527),
        ("wnut17/dev.txt.gz", "conll", TAGS, {}, 1009),
        ("conll2003_en/valid.txt.gz", "conll", TAGS, {}, 3250),
        ("squad/squad2_dev_part.json.gz", "squad", ANSWERS, {}, 5701),
        ("tatoeba_en_zh/cmn.txt.gz", "tsv", TRANSLATION, {}, 29155),
    ],
)  # fmt: skip
def test_real_files_have_the_published_number_of_records(
    file: str, format: str, reads: tuple[str, ...], settings: dict[str, Any], count: int
) -> None:
    assert len(values(corpus_path(file), format, reads, **settings)) == count


def test_trec_has_coarse_and_fine_labels(tmp_path: Path) -> None:
    path = tmp_path / "trec.txt"
    path.write_text("DESC:manner How did it develop ?\nHUM:ind Who is it ?\n")
    columns = (*TEXT, "label")
    coarse = list(read_corpus(Corpus(format="trec", files=(str(path),)), columns))
    assert [record.values for record in coarse] == [("How did it develop ?", "DESC"), ("Who is it ?", "HUM")]
    fine = list(read_corpus(Corpus(format="trec", files=(str(path),), columns={"label": "fine"}), columns))
    assert [record.values[1] for record in fine] == ["DESC:manner", "HUM:ind"]
    path.write_text("DESC:manner How?\nno kind here\n")
    with pytest.raises(UserError, match=r"trec.txt, line 2: 'no kind here' is not `COARSE:fine question`"):
        list(read_corpus(Corpus(format="trec", files=(str(path),)), columns))


def test_questions_are_held_out_by_article(tmp_path: Path) -> None:
    def article(n: int) -> dict[str, Any]:
        qas = [{"id": f"{n}-{k}", "question": f"{n}?", "answers": [{"text": "a", "answer_start": 0}]} for k in range(2)]
        return {"title": f"T{n}", "paragraphs": [{"context": f"a {n} {k}", "qas": qas} for k in range(3)]}

    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [article(n) for n in range(40)]}))
    config = DataConfig(task="answering", train=(Corpus(format="squad", files=(str(path),)),), held_out=0.3)
    records = list(read_corpus(config.train[0], ANSWERS))
    groups = {
        part: {record.group for record in Cleaner(config, ANSWERS, part).clean_chunk(records)}
        for part in ("kept", "held out")
    }
    assert groups["kept"] | groups["held out"] == {f"T{n}" for n in range(40)}
    assert not groups["kept"] & groups["held out"]
    assert 4 < len(groups["held out"]) < 20
    references = next(iter(read_corpus(config.train[0], ANSWERS_WITH_REFERENCES))).values[-1]
    assert references == ["a"]
