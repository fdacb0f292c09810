"""A changed token cache is refused in one line, and no file outside of it is touched, however it was changed.

CLEARHEAD_MUTATIONS=10000 sets the number of changed caches instead of 300.
"""

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.config.data import TokenizerConfig
from clearhead.data import Loader, prepare, token_store
from clearhead.data.token_store import Field, StoreWriter, TokenStore, build_store, read_cached, write_cached
from clearhead.errors import UserError
from tests.data.helpers import config, sentences, tokenizer, write
from tests.file_operations import operations_outside

COUNT = int(os.environ.get("CLEARHEAD_MUTATIONS", "300"))
FIELDS = {
    "ids": Field("uint16", 100, shortest=1),
    "boundary": Field("int32", 50, row=1),
    "labels": Field("int64", 3, -100, row="ids"),
    "span": Field("int32", 50, row=2, within="ids"),
}
ROWS = [
    {"ids": list(range(1, n + 1)), "boundary": [n], "labels": [n % 3 or -100] * n, "span": [0, n - 1]}
    for n in range(1, 41)
]


def fill(writer: StoreWriter) -> dict[str, int]:
    writer.add(ROWS)
    return {"empty": 2}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_store(tmp_path / "store", FIELDS, fill)
    return tmp_path / "store"


def change_header(folder: Path, change: Callable[[dict[str, Any]], object], reseal: bool = True) -> None:
    header = json.loads((folder / "store.json").read_text())
    change(header)
    if reseal:
        header["sha256"] = token_store._header_digest(header)
    (folder / "store.json").write_text(json.dumps(header))


def reseal_files(folder: Path) -> None:
    """Give the header the sizes and digests that the files have now, as an attacker would."""

    def update(header: dict[str, Any]) -> None:
        for name, entry in header["fields"].items():
            for part, dtype in (("values", entry["dtype"]), ("ends", "int64")):
                data = (folder / f"{name}.{part}.bin").read_bytes()
                writer = token_store._BlockWriter(folder / "again")
                writer.write(data)
                entry[part] = writer.close(np.dtype(dtype).itemsize)
                (folder / "again").unlink()
        header["rows"] = header["fields"]["ids"]["ends"]["size"]

    change_header(folder, update)


@pytest.mark.parametrize("dtype", ["O", "object", "uint32", "V8", "U4", "M8[s]", "float64", "<u2,<u2", "", "nonsense"])
def test_only_the_dtypes_of_the_task_are_mapped(store: Path, dtype: str) -> None:
    change_header(store, lambda header: header["fields"]["labels"].update(dtype=dtype))
    with pytest.raises(UserError, match="other fields, dtypes or version than those of this task"):
        TokenStore(store, FIELDS)


def test_fields_of_another_task_are_refused(store: Path) -> None:
    with pytest.raises(UserError, match="other fields"):
        TokenStore(store, {"ids": FIELDS["ids"]})
    change_header(store, lambda header: header["fields"].pop("span"))
    with pytest.raises(UserError, match="other fields"):
        TokenStore(store, FIELDS)


def test_a_changed_value_or_header_is_noticed(store: Path) -> None:
    for file in sorted(store.iterdir()):
        data = file.read_bytes()
        for position in (0, len(data) // 2, len(data) - 2):
            file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
            with pytest.raises(UserError, match=r"is not a usable token cache .*delete the folder"):
                TokenStore(store, FIELDS)
        file.write_bytes(data)
    TokenStore(store, FIELDS)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ids.values", lambda values: values + 100, r"ids\.values\.bin: a value is not in 0 … 99"),
        ("labels.values", lambda values: values * 0 - 1, r"labels\.values\.bin: a value is not in 0 … 2"),
        ("boundary.values", lambda values: values - 9, r"boundary\.values\.bin: a value is not in"),
        ("ids.ends", lambda ends: ends[::-1], r"ids\.ends\.bin: rows are not in order"),
        ("ids.ends", lambda ends: ends - 1, r"ids\.ends\.bin: rows are not in order"),
        ("ids.ends", lambda ends: ends + 1, r"ids\.ends\.bin: rows are not in order"),
        ("ids.ends", lambda ends: ends * 0 + ends[-1], r"ids\.ends\.bin: rows are not in order"),
        ("labels.ends", lambda ends: np.append(ends[:1] + 1, ends[1:]), r"labels\.ends\.bin: rows have another length"),
        ("span.ends", lambda ends: np.append(ends[:-1], ends[-2:-1]), r"span\.ends\.bin: rows have another length"),
        ("span.values", lambda values: values + 1, r"span\.values\.bin: a position is outside its row"),
    ],
)
def test_values_that_no_task_writes_are_refused(store: Path, name: str, change: Any, message: str) -> None:
    path = store / f"{name}.bin"
    dtype = np.dtype("int64" if name.endswith("ends") else FIELDS[name.partition(".")[0]].dtype)
    path.write_bytes(change(np.fromfile(path, dtype)).astype(dtype).tobytes())
    reseal_files(store)
    with pytest.raises(UserError, match=message):
        TokenStore(store, FIELDS)


@pytest.mark.parametrize("kind", ["pipe", "socket", "link", "folder"])
def test_pipes_sockets_and_links_are_refused_at_once(store: Path, kind: str) -> None:
    for name in ("store.json", "ids.values.bin", "span.ends.bin"):
        original = (store / name).rename(store.parent / "original")
        if kind == "pipe":
            os.mkfifo(store / name)
        elif kind == "socket":
            server = socket.socket(socket.AF_UNIX)
            server.bind(os.path.relpath(store / name))
        elif kind == "link":
            (store / name).symlink_to(original)
        else:
            (store / name).mkdir()
        with pytest.raises(UserError, match=r"not a regular file|Is a directory"):
            TokenStore(store, FIELDS)
        (store / name).rmdir() if kind == "folder" else (store / name).unlink()
        original.rename(store / name)


def test_of_a_large_file_a_sample_is_checked_unless_its_time_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "BLOCK", 64)
    monkeypatch.setattr(token_store, "CHECKED_BLOCKS", 8)
    build_store(tmp_path / "store", {"ids": FIELDS["ids"]}, lambda writer: writer.add([{"ids": [7] * 32_000}]) or {})
    path = tmp_path / "store" / "ids.values.bin"
    data, status = path.read_bytes(), path.stat()
    noticed = {True: 0, False: 0}
    for keep_time in (True, False):
        for block in range(0, len(data) // 64, 10):
            path.write_bytes(data[: 64 * block] + b"\1" + data[64 * block + 1 :])
            if keep_time:
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            try:
                TokenStore(tmp_path / "store", {"ids": FIELDS["ids"]})
            except UserError:
                noticed[keep_time] += 1
    assert noticed[False] == 100, "every block is checked"
    assert 1 <= noticed[True] <= 8, "the sample is the first, the last, and six of 998 blocks"


def test_a_changed_tokenizer_or_label_list_of_the_cache_is_noticed(tmp_path: Path) -> None:
    rows = [(line, str(n % 2)) for n, line in enumerate(sentences(60))]
    file = write(tmp_path / "rows", ("\t".join(row) for row in rows))
    settings = config(tmp_path, "classification", train={"format": "tsv", "files": file})
    size = TokenizerConfig(vocab_size=300)
    prepare(settings, size)
    [tokens] = (tmp_path / "cache" / "tokenizers").glob("*.json")
    [labels] = (tmp_path / "cache" / "labels").glob("*.json")
    for changed, old, new in ((tokens, '"a":', '"A":'), (labels, '"0"', '"2"')):
        text = changed.read_text()
        assert old in text
        changed.write_text(text.replace(old, new, 1))
        with pytest.raises(UserError, match=f"{changed} changed since it was written; delete it"):
            prepare(settings, size)
        changed.write_text(text)
    prepare(settings, size)


def test_a_changed_digest_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "CLOCK_RESOLUTION", -1 << 62)  # as if written long ago
    (tmp_path / "file").write_text("text")
    digest = token_store.file_digest(tmp_path / "file", tmp_path)
    [entry] = (tmp_path / "seen").iterdir()
    for text in ("0" * 64, "", "\udcff"):
        entry.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert token_store.file_digest(tmp_path / "file", tmp_path) == digest
    write_cached(entry, "../../x")
    assert token_store.file_digest(tmp_path / "file", tmp_path) == digest
    assert read_cached(entry) == digest
    entry.unlink()
    os.mkfifo(entry)
    assert token_store.file_digest(tmp_path / "file", tmp_path) == digest


def test_changed_caches_never_give_a_traceback_or_touch_other_files(tmp_path: Path) -> None:
    """Random changes of header and files, most of them sealed again, of a cache that is then read to the end."""
    rows = [(line, str(n % 2)) for n, line in enumerate(sentences(40))]
    file = write(tmp_path / "rows", ("\t".join(row) for row in rows))
    tokens = tokenizer()
    prepared = prepare(config(tmp_path, "classification", train={"format": "tsv", "files": file}), [tokens], ("0", "1"))
    [original] = prepared.train.stores
    rng, refused = random.Random(0), 0
    for _ in range(COUNT):
        folder = tmp_path / "changed" / "store"
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(original.folder, folder)
        describe, message = change_randomly(folder, rng), ""
        with operations_outside(folder) as outside:
            try:
                store = TokenStore(folder, prepared.train.task.fields)
                prepared.train.stores = [store]
                for step in Loader(prepared.train, batch_tokens=4096, shuffle=False, workers=0):
                    for batch in step.batches:
                        assert 0 <= int(batch["ids"].min()) <= int(batch["ids"].max()) < len(tokens), describe
                        assert set(batch["labels"].tolist()) <= {0, 1}, describe
            except UserError as error:
                refused, message = refused + 1, str(error)
        assert not outside, describe
        assert "\n" not in message, describe
    assert refused > COUNT / 2
    print(f"{COUNT} changed caches, {refused} refused, 0 tracebacks, 0 file operations outside")


VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 1 << 62, 1 << 80, 0.5, "", "O", "../../x", "/etc/passwd", "a\0b", [], {}, [1], {"a": 1}),
    *("uint16", "int64", "\ud800", "x" * 5000, [[]] * 50, {"dtype": "O"}),
]


def change_randomly(folder: Path, rng: random.Random) -> str:
    """Change the header, a file, or both; return what was done."""
    kind = rng.choice(["header", "header", "values", "values", "size", "text"])
    if kind == "text":
        data = bytearray((folder / "store.json").read_bytes())
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (folder / "store.json").write_bytes(data)
        return f"{kind} {bytes(data)!r:.3000}"
    if kind == "header":
        done = ""

        def change(header: dict[str, Any]) -> None:
            nonlocal done
            place: Any = header
            for _ in range(rng.randrange(4)):
                inner = [key for key in place if isinstance(place[key], dict)]
                place = place[rng.choice(inner)] if inner else place
            key, value = rng.choice([*place, rng.choice(["new", "../x", ""])]), rng.choice(VALUES)
            done = f"{key} = {value!r:.80}"
            if rng.random() < 0.2:
                place.pop(key, None)
            else:
                place[key] = value

        change_header(folder, change, reseal=rng.random() < 0.8)
        return done
    path = rng.choice(sorted(folder.glob("*.bin")))
    data = bytearray(path.read_bytes())
    if kind == "size":
        data = data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + bytes(rng.randrange(1, 64))
    else:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255])
    path.write_bytes(data)
    if rng.random() < 0.8:
        reseal_files(folder)
    return f"{kind} {path.name}"
