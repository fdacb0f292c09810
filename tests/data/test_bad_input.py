"""Bad input is an error with file, line and fix, and leaves nothing incomplete in the cache."""
# ruff: noqa: E501

import errno
import gzip
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.config.data import DataConfig, TokenizerConfig
from clearhead.data import from_records, prepare
from clearhead.data import token_store as store_file
from clearhead.errors import ConfigError, UserError
from tests.data.helpers import config, leftovers, sentences, tokenizer, write

JSON = json.dumps


def squad(**changed: Any) -> str:
    question = {"id": "q7", "question": "who?", "answers": [{"text": "Bob", "answer_start": 4}]} | changed
    return JSON({"data": [{"paragraphs": [{"context": "Hey Bob", "qas": [question]}]}]})


# task, format, corpus settings, content, message
FILES: list[tuple[str, str, dict[str, Any], str | bytes, str]] = [
    ("language-model", "text", {}, b"fine\nbad \xff\n", "file, line 2: not valid UTF-8; save"),
    ("language-model", "text", {}, b"", "file is empty; give a file with content"),
    ("language-model", "text", {}, "a\nb\0c\n", "file, line 2: contains a zero byte; if the file is UTF-16, save it as UTF-8"),
    ("language-model", "text", {}, gzip.compress(b"some text\n" * 9, mtime=0)[:-12], r"file, after line \d: the gzip data is truncated or damaged; fetch"),
    ("language-model", "text", {}, gzip.compress(b"x\n" * 9, mtime=0)[:-8] + b"12345678", "the gzip data is damaged; fetch"),
    ("language-model", "text", {}, b"\x1f\x8b\x08", "after line 0: the gzip data is truncated or damaged; fetch"),
    ("language-model", "text", {}, gzip.compress(b"fine\n\xff", mtime=0), "file, line 2: not valid UTF-8"),
    ("language-model", "text", {}, b"\n \n", r"no samples in .*file"),
    ("language-model", "parallel", {}, "a\n", r"parallel files hold a source and a target; this task reads text"),
    ("language-model", "text", {"columns": {"txt": 1}}, "a\n", "columns: this task has no column 'txt'; did you mean text"),
    ("translation", "tsv", {}, "a\tb\nc\n", "file, line 2: only 1 columns, but 2 are needed for source and target; .*tabs"),
    ("translation", "tsv", {"columns": {"source": "en", "target": "de"}}, "en\tde \na\tb", "file, line 1: no column 'de'; did you mean de "),
    ("translation", "tsv", {"columns": {"source": "en"}}, "", "file is empty"),
    ("translation", "tsv", {"columns": {"source": "en"}}, "x" * 999, "no column 'en'; known: x{39}…; without a header, give columns by number"),
    ("translation", "csv", {}, "a\tb\n", "only 1 columns.*commas, or set columns; if the file is tsv, set format"),
    ("translation", "tsv", {}, "a,b\n", "only 1 columns.*tabs, or set columns; if the file is csv, set format"),
    ("translation", "csv", {}, 'a,b\n"open,c\n', "file, line 2: unexpected end of data; check the quotation marks"),
    ("translation", "csv", {}, "a,b\nc\n", "file, line 2: only 1 columns.*commas"),
    ("translation", "tsv", {}, "a\t\n\tb\n", r"no samples in .*file.* .left out: 2 empty."),
    ("translation", "text", {}, "a\n", "plain text has no columns; this task reads source, target; use tsv or jsonl"),
    ("translation", "jsonl", {}, '{"source": "a", "target": "b"}\n{"source": "a"}\n', "file, line 2: no key 'target'; "),
    ("translation", "jsonl", {}, '{"source": "a", "target": 5}\n', "file, line 1: 5 is int, not a text; put it in quotes"),
    ("translation", "jsonl", {}, '{"source": "a", "target": true}\n', "file, line 1: True is bool, not a text"),
    ("translation", "jsonl", {}, '{"source": ["a"], "target": "b"}\n', r"file, line 1: \['a'\] is list, not a text"),
    ("translation", "jsonl", {}, '{"source": "a", "target": "\\ud83d"}\n', r"file, line 1: U\+D83D is half of a surrogate pair"),
    ("translation", "jsonl", {}, "\n{'source'}\n", "file, line 2: not valid JSON .*; write one object per line"),
    ("translation", "jsonl", {}, "[1]\n", "file, line 1: list, not an object; write one object per line"),
    ("translation", "jsonl", {}, '{"source": ' + "1" * 5000 + "}\n", "file, line 1: not valid JSON"),
    ("translation", "jsonl", {}, "[" * 100_000 + "\n", "file, line 1: not valid JSON"),
    ("classification", "tsv", {}, "a\tpos\nb\tnge\n", "file, line 2: label 'nge' is not in the label set; did you mean neg"),
    ("classification", "jsonl", {}, '{"text": "a", "label": null}\n', "file, line 1: None is not a label; use a string or an integer"),
    ("classification", "jsonl", {}, '{"text": null, "label": "pos"}\n', "file, line 1: None is NoneType, not a text"),
    ("regression", "tsv", {}, "a\t1\nb\tnan\n", "file, line 2: 'nan' is not a number; check which column is the score"),
    ("regression", "tsv", {}, "a\t1e39\n", "file, line 1: '1e39' is not a number"),
    ("regression", "jsonl", {}, '{"text": "a", "label": true}\n', "file, line 1: True is not a number"),
    ("similarity", "csv", {}, "a,b,high\n", "file, line 1: 'high' is not a number"),
    ("tagging", "conll", {}, "EU B-ORG\nalone\n", "file, line 2: 'alone' has no tag after its token; write `token tag`"),
    ("tagging", "conll", {}, "EU B-ORG\n\nx B-OGR\n", "file, line 3: label 'B-OGR' is not in the label set; did you mean B-ORG"),
    ("tagging", "conll", {"columns": {"tags": 4}}, "EU B-ORG\n", "file, line 1: only 2 columns, but columns names 1 and 4"),
    ("tagging", "conll", {"columns": {"tags": -3}}, "EU B-ORG\n", "file, line 1: only 2 columns, but columns names 1 and -3"),
    ("tagging", "conll", {"columns": {"tags": "ner"}}, "EU B-ORG\n", "conll has no header; give the columns .* by number"),
    ("tagging", "tsv", {}, "EU\tB-ORG\n", "tsv has no lists in its columns; this task reads tokens, tags; use jsonl"),
    ("tagging", "jsonl", {}, '{"tokens": ["a", "b"], "tags": ["O"]}\n', "file, line 1: 2 tokens but 1 tags; give every token one tag"),
    ("tagging", "jsonl", {}, '{"tokens": "a b", "tags": ["O"]}\n', "file, line 1: tokens are a string; give a list of words"),
    ("tagging", "jsonl", {}, '{"tokens": ["a"], "tags": "O"}\n', "file, line 1: tokens and tags must be lists"),
    ("tagging", "jsonl", {}, '{"tokens": ["a", 5], "tags": ["O", "O"]}\n', "file, line 1: 5 is int, not a text"),
    ("answering", "squad", {}, squad(answers=[{"text": "Bob", "answer_start": 3}]), "file, question q7: the answer 'Bob' is not at character 3 of the context .there: ' Bo'.; count characters"),
    ("answering", "squad", {}, squad(answers=[{"text": "Hey", "answer_start": -1}]), "file, question q7: the answer's start is -1; give an integer, 0 or more"),
    ("answering", "squad", {}, squad(answers=[{"text": "Bob", "answer_start": "4"}]), "file, question q7: the answer's start is '4'"),
    ("answering", "squad", {}, squad(answers=[{"text": 7, "answer_start": 4}]), "file, question q7: the answer is 7, not a text"),
    ("answering", "squad", {}, squad(answers=[{"text": "Bob"}]), "file, question 1: not in SQuAD format .*answer_start.*; expected data"),
    ("answering", "squad", {}, JSON({"data": [{"paragraphs": [{"context": "x", "qas": ["q"]}]}]}), "file, question 1: not in SQuAD format"),
    ("answering", "squad", {}, '{"data":', "file: not valid JSON .*; give a SQuAD file"),
    ("answering", "squad", {}, "", "file is empty"),
    ("answering", "jsonl", {}, JSON({"context": "Hey Bob", "question": "?", "answer": "Bob", "start": 5}), "file, line 1: the answer 'Bob' is not at character 5"),
    ("classification", "squad", {}, squad(), "squad holds questions and answers; this task reads text, label"),
    ("translation", "conll", {}, "a b\n", "conll holds tokens and tags; this task reads source, target"),
    ("language-model", "symbols", {}, "", "symbols are for translation; this task reads text"),
]  # fmt: skip
LABEL_SETS = {"classification": ["pos", "neg"], "tagging": ["O", "B-ORG"]}


@pytest.mark.parametrize(("task", "format", "settings", "content", "message"), FILES)
def test_a_bad_file_gives_name_line_and_fix(
    task: str, format: str, settings: dict[str, Any], content: str | bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    files = [str(path)] * (2 if format == "parallel" else 0 if format == "symbols" else 1)
    corpus = {"format": format, "files": files, **settings}
    chosen = config(tmp_path, task, train=corpus, labels=LABEL_SETS.get(task, []), max_length=16, stride=2)
    with pytest.raises(UserError, match=message) as caught:
        prepare(chosen, [tokenizer()])
    assert "\n" not in str(caught.value)
    if "no samples" not in message:  # such a store is complete
        assert not leftovers(tmp_path / "cache")


def test_parallel_files_of_different_lengths_give_both_counts(tmp_path: Path) -> None:
    short, long = write(tmp_path / "short", ["a"] * 3), write(tmp_path / "long", ["b"] * 5)
    for files, first, second in (
        ([short, long], "short has 3", "long has 5"),
        ([long, short], "long has 5", "short has 3"),
    ):
        chosen = config(tmp_path, "translation", train={"format": "parallel", "files": files})
        for tokenizers in ([tokenizer()], TokenizerConfig(vocab_size=300)):
            with pytest.raises(
                UserError, match=f"{first} lines and .*{second}: line 4 of one has no counterpart; .*same"
            ):
                prepare(chosen, tokenizers)  # type: ignore[arg-type]
    assert not leftovers(tmp_path / "cache")


def test_a_vocabulary_larger_than_the_text_supports_is_an_error(tmp_path: Path) -> None:
    files = write(tmp_path / "text", ["ab ab ab"])
    chosen = config(tmp_path, "language-model", train={"files": files})
    with pytest.raises(
        UserError, match=r"size: 5,000 tokens were requested, but the text supports only \d+; ask for at"
    ):
        prepare(chosen, TokenizerConfig(vocab_size=5000))
    with pytest.raises(UserError, match="size: 20 is too small for byte-bpe; it needs"):
        prepare(chosen, TokenizerConfig(vocab_size=20))
    assert not leftovers(tmp_path / "cache")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for files, message in (
        (str(tmp_path / "empty"), "is an empty folder; give a file"),
        ("none", "none does not exist; "),
        ("-", "standard input"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(config(tmp_path, "language-model", train={"files": files}), TokenizerConfig(vocab_size=300))
    with pytest.raises(UserError, match=r"data\.train: missing; name the training files"):
        prepare(config(tmp_path, "language-model"), [tokenizer()])


def limit_file_size(write_limit: int) -> Callable[[], None]:
    """Limit the size of files this process writes; return a function that lifts the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (write_limit, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [0, 100, 20_000])
def test_a_full_disk_leaves_nothing_and_gives_a_fix(limit: int, tmp_path: Path) -> None:
    files = write(tmp_path / "text", sentences(3000))
    chosen = config(tmp_path, "language-model", train={"files": files})
    restore = limit_file_size(limit)
    try:
        with pytest.raises(
            UserError, match=r"cannot be written .File too large.; (free some space|nothing was changed)"
        ):
            prepare(chosen, [tokenizer()])
        with pytest.raises(UserError, match=r"cannot be written .File too large."):
            prepare(chosen, TokenizerConfig(vocab_size=300)) if limit < 20_000 else prepare(chosen, [tokenizer()])
        with pytest.raises(UserError, match="File too large"):
            from_records(chosen, ((line,) for line in sentences(3000)), [tokenizer()])
    finally:
        restore()
    assert not leftovers(tmp_path / "cache")
    assert len(prepare(chosen, [tokenizer()]).train.stores[0]) > 0


def test_a_disk_full_at_the_last_fsync_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config(tmp_path, "language-model", train={"files": write(tmp_path / "text", sentences(20))})

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(store_file.os, "fsync", no_space)
        with pytest.raises(UserError, match=r"cache cannot be written \(No space left on device\); free .*data\.cache"):
            prepare(chosen, [tokenizer()])
    assert not leftovers(tmp_path / "cache")
    blocked = DataConfig.build({"task": "language-model", "train": {"files": "x"}, "cache_dir": str(tmp_path / "text")})
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\); set data\.cache"):
        prepare(blocked.model_copy(update={"train": chosen.train}), [tokenizer()])


def test_records_in_memory_are_named_by_number(tmp_path: Path) -> None:
    chosen = config(tmp_path, "translation")
    for bad_record, message in (
        ("text", "record 2: 'text' is not a tuple of 2; give .source, target."),
        (("a",), "record 2: .'a',"),
        (("a", 1), "record 2: 1 is int"),
    ):
        with pytest.raises(UserError, match=message):
            from_records(chosen, [("a", "b"), bad_record], [tokenizer()])
    with pytest.raises(UserError, match="record 1: label 'x' is not in the label set, which is empty; name the labels"):
        from_records(config(tmp_path, "classification"), [("a", "x")], [tokenizer()])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "task: missing; add it"),
        ({"task": "translate"}, "task: 'translate' is not allowed; use translation, "),
        ({"task": "tagging", "train": {"format": "conll", "fils": ["x"]}}, r"train\.0\.fils: unknown setting; did you mean files\?"),
        ({"task": "tagging", "train": {"format": "conll"}}, "files: missing; name the files of this conll corpus"),
        ({"task": "translation", "train": {"format": "symbols", "files": "x"}}, "symbols is synthetic and reads no files"),
        ({"task": "translation", "train": {"format": "parallel", "files": "x"}}, "files: 1 given; parallel needs pairs of a source and a target"),
        ({"task": "translation", "train": {"format": "symbols", "min_length": 9, "max_length": 3}}, "min_length: 9 is more than max_length 3; lower it"),
        ({"task": "translation", "train": {"format": "embedded", "languages": ["en", "de", "zh"]}}, "languages: name one, or a source and a target"),
        ({"task": "translation", "train": {"format": "tsv", "files": "x", "columns": {"source": 0}}}, "there is no column 0; the first is 1"),
        ({"task": "translation", "train": {"format": "tsv", "files": "x", "weight": 0}}, r"train\.0\.weight: 0 is too small"),
        ({"task": "translation", "train": "x"}, "train: 'x' is not a corpus; write its settings, like `files: …`"),
        ({"task": "language-model", "max_length": 2}, "max_length: 2 is too small; use 5 or more"),
        ({"task": "language-model", "batch_tokens": 1 << 40}, "batch_tokens: .* is too large"),
        ({"task": "language-model", "held_out": 0.1, "valid": {"files": "x"}}, "held_out: valid is set too; remove one"),
        ({"task": "translation", "target_language": "Chinese"}, "target_language: 'Chinese' is not a language code; write it like zh"),
        ({"task": "answering", "lowercase": True}, "they would shift the answers' character offsets; let the tokenizer do it"),
        ({"task": "classification", "labels": ["a", "a"]}, "labels: duplicate label"),
    ],
)  # fmt: skip
def test_bad_settings_give_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig.build(settings)


def test_a_label_column_with_free_text_is_an_error(tmp_path: Path) -> None:
    lines = write(tmp_path / "rows", (f"text\tnumber {n}" for n in range(10_002)))
    with pytest.raises(UserError, match=r"rows, line 10001: more than 10,000 different labels; set columns\.label"):
        prepare(config(tmp_path, "classification", train={"format": "tsv", "files": lines}), [tokenizer()])


@pytest.mark.parametrize("format", ["tsv", "csv"])
def test_a_missing_label_is_an_error(format: str, tmp_path: Path) -> None:
    separator = {"tsv": "\t", "csv": ","}[format]
    lines = write(tmp_path / "rows", (f"text{separator}{label}" for label in ("past", "", "now")))
    with pytest.raises(UserError, match="rows, line 2: the label is missing"):
        prepare(config(tmp_path, "classification", train={"format": format, "files": lines}), [tokenizer()])


def test_a_single_label_is_an_error(tmp_path: Path) -> None:
    lines = write(tmp_path / "rows", ("text\tpast", "more\tpast"))
    with pytest.raises(UserError, match=r"data\.train: 'past' is the only label; classification needs two or more"):
        prepare(config(tmp_path, "classification", train={"format": "tsv", "files": lines}), [tokenizer()])


def test_next_sentence_needs_two_documents(tmp_path: Path) -> None:
    files = write(tmp_path / "text", sentences(50))
    settings = {"train": {"files": files}, "next_sentence": True, "max_length": 20}
    with pytest.raises(UserError, match=r"next_sentence: needs two documents or more; set data\.documents to heading"):
        prepare(config(tmp_path, "masked-language-model", **settings), [tokenizer()])
    assert prepare(
        config(tmp_path, "masked-language-model", documents="line", **settings), [tokenizer()]
    ).train.num_samples(0)
