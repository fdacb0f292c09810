"""The token cache: reused if nothing changed, rebuilt if something did, built once by concurrent processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.config.data import TokenizerConfig
from clearhead.data import from_records, open_dataset, prepare
from clearhead.data.token_store import (
    Field,
    StoreWriter,
    TokenStore,
    build_store,
    build_temporary_store,
    concat_ranges,
    file_digest,
)
from clearhead.errors import UserError
from clearhead.text import Tokenizer, train
from tests.data.helpers import config, leftovers, sentences, tokenizer, write

FIELDS = {"ids": Field("uint16"), "score": Field("float32", row=1)}


@settings(max_examples=25)
@given(st.lists(st.tuples(st.lists(st.integers(0, 65535), max_size=5), st.floats(-9, 9, width=32)), max_size=20))
def test_rows_round_trip(rows: list[tuple[list[int], float]]) -> None:
    def fill(writer: StoreWriter) -> dict[str, int]:
        for start in range(0, len(rows), 3):
            writer.add([{"ids": ids, "score": [score]} for ids, score in rows[start : start + 3]])
        return {"empty": 7}

    store = build_temporary_store(FIELDS, fill)
    assert len(store) == len(rows)
    assert store.dropped == {"empty": 7}
    assert store.num_values("ids") == sum(len(ids) for ids, _ in rows)
    chosen = np.arange(len(rows))[::-2].copy()
    values, lengths = store.gather("ids", chosen)
    assert values.tolist() == [number for row in chosen for number in rows[row][0]]
    assert lengths.tolist() == [len(rows[row][0]) for row in chosen]
    assert store.gather("score", chosen)[0].tolist() == [rows[row][1] for row in chosen]
    assert not store.folder.exists(), "a killed process leaves nothing"


def test_concat_ranges() -> None:
    assert concat_ranges(np.array([5, 0, 7]), np.array([3, 0, 2])).tolist() == [5, 6, 7, 7, 8]
    assert concat_ranges(np.array([], int), np.array([], int)).tolist() == []


def fill_one(writer: StoreWriter) -> dict[str, int]:
    writer.add([{"ids": [1, 2, 3], "score": [0.5]}])
    return {}


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("ids.values.bin", lambda data: data[:-1], "ids.values.bin has 5 bytes, not 6"),
        ("score.ends.bin", lambda data: data + b"\0", "score.ends.bin has 9 bytes, not 8"),
        ("score.ends.bin", None, "score.ends.bin"),
        ("store.json", lambda data: data[:-20], "not a usable token cache"),
        ("store.json", lambda data: b"[]", "not a usable token cache"),
        ("store.json", lambda data: b'{"rows": 1, "dropped": {}, "fields": []}', "not a usable token cache"),
    ],
)  # fmt: skip
def test_a_damaged_store_is_an_error_with_its_name(file: str, change: Any, message: str, tmp_path: Path) -> None:
    build_store(tmp_path / "made", FIELDS, fill_one)
    path = tmp_path / "made" / file
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(
        UserError, match=f"{tmp_path / 'made'} is not a usable token cache .*{message}|{message}"
    ) as caught:
        build_store(tmp_path / "made", FIELDS, fill_one)
    assert "delete the folder, the next run recreates it" in str(caught.value)


def test_incomplete_stores_are_replaced(tmp_path: Path) -> None:
    for name in ("made", ".made.4711.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ids.values.bin").write_text("half")
    assert build_store(tmp_path / "made", FIELDS, fill_one).gather("ids", np.array([0]))[0].tolist() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.lock"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(writer: StoreWriter) -> dict[str, int]:
        fill_one(writer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(tmp_path / "made", FIELDS, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["made.lock"]


class EncodeCounter:
    """Counts calls of `Tokenizer.encode_batch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls, encode_batch = 0, Tokenizer.encode_batch

        def counting(tokenizer: Tokenizer, *arguments: Any) -> Any:
            self.calls += 1
            return encode_batch(tokenizer, *arguments)

        monkeypatch.setattr(Tokenizer, "encode_batch", counting)


def test_the_cache_is_reused_unless_its_content_would_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = sentences(300)
    files = [write(tmp_path / "a", lines), write(tmp_path / "b", lines[::-1])]
    base: dict[str, Any] = {"train": {"format": "parallel", "files": files}, "held_out": 0.2}
    counter, messages = EncodeCounter(monkeypatch), list[str]()
    size = TokenizerConfig(vocab_size=300)
    first = prepare(config(tmp_path, "translation", **base), size, log=messages.append)
    assert messages[0] == "training a byte-bpe tokenizer of 300 …"
    assert counter.calls
    counter.calls = 0
    batching = {"batch_tokens": 99, "bucket_size": 7, "workers": 0, "packed": True, "source_url": "there"}
    batching |= {"isolate_documents": True, "mask_prob": 0.3, "whole_word_masking": True, "target_language": "de"}
    again = prepare(config(tmp_path, "translation", **base, **batching), size, log=lambda line: pytest.fail(line))
    assert not counter.calls
    assert [store.folder for store in again.train.stores] == [store.folder for store in first.train.stores]
    assert again.tokenizers[0].vocabulary == first.tokenizers[0].vocabulary
    changes = {
        "max_length": 60,
        "min_length": 3,
        "lowercase": True,
        "deduplicate": True,
        "max_length_ratio": 2.0,
        "held_out": 0.3,
    }
    for change in [*changes.items(), ("normalize", "nfc")]:
        counter.calls = 0
        prepare(config(tmp_path, "translation", **base | dict([change])), first.tokenizers)
        assert counter.calls, change
    counter.calls = 0
    prepare(config(tmp_path, "translation", **base), [train(lines, "byte-bpe", 290, exact=False)])
    assert counter.calls, "another tokenizer"
    counter.calls = 0
    weighted = {**base, "train": {**base["train"], "weight": 2.0}}
    prepare(config(tmp_path, "translation", **weighted), first.tokenizers)
    assert not counter.calls, "a weight"
    swapped = {**base, "train": {"format": "parallel", "files": files[::-1]}}
    assert (
        prepare(config(tmp_path, "translation", **swapped), first.tokenizers).train.stores[0].folder
        != first.train.stores[0].folder
    )
    with open(files[0], "r+", encoding="utf-8") as file:
        file.write("X")
    counter.calls = 0
    prepare(config(tmp_path, "translation", **base), first.tokenizers)
    assert counter.calls, "another content"


def test_the_tokenizer_is_trained_on_the_columns_of_the_task(tmp_path: Path) -> None:
    pair = [("aaaa aaaa" * 9, "bbbb bbbb" * 9, "x")] * 9
    files = write(tmp_path / "rows", ("\t".join(row) for row in pair))
    alone = {"train": {"format": "tsv", "files": files, "columns": {"label": 3}}, "labels": ["x"]}
    kind = TokenizerConfig(kind="char", vocab_size=50)
    one = prepare(config(tmp_path, "classification", **alone), kind).tokenizers[0]
    two = prepare(config(tmp_path, "classification", text_pairs=True, **alone), kind).tokenizers[0]
    assert "b" not in one.vocabulary
    assert "b" in two.vocabulary
    assert "x" not in two.vocabulary
    sides = {"train": {"format": "tsv", "files": files}}
    separate = prepare(
        config(tmp_path, "translation", **sides), TokenizerConfig(kind="char", vocab_size=50, joint=False)
    ).tokenizers
    assert ["a" in side.vocabulary for side in separate] == [True, False]
    assert ["b" in side.vocabulary for side in separate] == [False, True]


def test_newlines_are_part_of_a_text(tmp_path: Path) -> None:
    files = write(tmp_path / "text", sentences(20))
    data = prepare(
        config(tmp_path, "language-model", train={"files": files}), TokenizerConfig(kind="char", vocab_size=100)
    )
    ids = data.train.stores[0].gather("ids", np.array([0]))[0].tolist()
    assert data.tokenizers[0].decode(ids) == "\n".join(sentences(20))
    assert data.tokenizers[0].id("unknown") not in ids


def test_a_changed_file_gets_a_new_digest(tmp_path: Path) -> None:
    path, old = tmp_path / "file", time.time() - 100
    digests = set()
    for text in (b"aaaa", b"bbbb", b"cccc"):  # same length, inode and mtime
        path.write_bytes(text)
        os.utime(path, (old, old))
        digest = file_digest(path, tmp_path / "cache")
        assert file_digest(path, tmp_path / "cache") == digest
        digests.add(digest)
    assert len(digests) == 3


def test_an_unchanged_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"text")
    monkeypatch.setattr("clearhead.data.token_store.CLOCK_RESOLUTION", -1 << 62)  # as if written long ago
    digest = file_digest(path, tmp_path / "cache")
    monkeypatch.setattr("clearhead.data.token_store.hashlib.file_digest", lambda *_: pytest.fail("read again"))
    assert file_digest(path, tmp_path / "cache") == digest


# One process imports everything, then forks three independent ones.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
from clearhead.config.data import DataConfig
from clearhead.data import prepare
from clearhead.text import Tokenizer

folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
encode_batch, calls = Tokenizer.encode_batch, []

def run(name, pause):
    def slow(self, texts, specials=False):
        calls.append(len(texts))
        (folder / f"inside-{name}").touch()
        time.sleep(pause)
        return encode_batch(self, texts, specials)

    Tokenizer.encode_batch = slow
    while not (folder / f"go-{name}").exists():
        time.sleep(0.005)
    store = prepare(DataConfig.build(settings), [Tokenizer.load(folder / "tokenizer.json")]).train.stores[0]
    (folder / f"{name}.json").write_text(json.dumps([str(store.folder), len(store), len(calls)]))

for name, pause in (("killed", 600), ("one", 0.5), ("two", 0.5)):
    process = os.fork()
    if not process:
        run(name, pause)
        os._exit(0)
    (folder / f"{name}.new").write_text(str(process))
    (folder / f"{name}.new").rename(folder / f"{name}.process")
for _ in range(3):
    os.wait()
"""


def wait_for(path: Path) -> None:
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.01)
    raise TimeoutError(path)


def test_concurrent_processes_build_a_store_once_even_if_one_is_killed(tmp_path: Path) -> None:
    tokenizer().save(tmp_path / "tokenizer.json")
    file = write(tmp_path / "text", sentences(99))
    settings = {"task": "language-model", "cache_dir": str(tmp_path / "cache"), "train": {"files": file}}

    main = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(settings)])
    try:
        (tmp_path / "go-killed").touch()
        wait_for(tmp_path / "inside-killed")
        os.kill(int((tmp_path / "killed.process").read_text()), signal.SIGKILL)
        assert [name for name in leftovers(tmp_path / "cache") if name.endswith(".tmp")], "killed while writing"
        for name in ("one", "two"):
            (tmp_path / f"go-{name}").touch()
        assert main.wait(timeout=60) == 0
    finally:
        main.kill()
    results = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two")]
    assert results[0][:2] == results[1][:2]
    assert sorted(calls for _, _, calls in results) == [0, 1]
    assert sorted(path.name for path in Path(results[0][0]).parent.iterdir()) == [
        Path(results[0][0]).name,
        Path(results[0][0]).name + ".lock",
    ]
    fields = {"ids": Field("uint16"), "opens": Field("uint8")}
    assert len(TokenStore(Path(results[0][0]), fields)) == results[0][1]


def test_a_test_set_uses_the_tokenizers_and_labels_of_a_model(tmp_path: Path) -> None:
    rows = [(line, str(n % 2)) for n, line in enumerate(sentences(30))]
    file = write(tmp_path / "rows", ("\t".join(row) for row in rows))
    chosen = config(tmp_path, "classification", test={"format": "tsv", "files": file})
    for labels in (("0", "1"), ("1", "0")):
        batch = open_dataset(chosen, chosen.test, [tokenizer()], labels).batch(np.arange(30), 0, 0)
        assert [labels[n] for n in batch["labels"].tolist()] == [label for _, label in rows]


def test_a_dataset_from_an_iterable_uses_no_cache(tmp_path: Path) -> None:
    made = from_records(config(tmp_path, "translation"), (("a b", "b a") for _ in range(5)), [tokenizer()])
    assert made.num_samples(0) == 5
    assert not (tmp_path / "cache").exists()
