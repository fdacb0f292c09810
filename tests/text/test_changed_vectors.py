"""Changed files of word vectors and classifiers: a clear error or a working model, and no other file is touched.

CLEARHEAD_MUTATIONS=10000 sets the number of changed files instead of 200.
"""

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.errors import UserError
from clearhead.text.bag_of_words import BagOfWords, LinearClassifier
from clearhead.text.tensors import save_tensors
from clearhead.text.word_vectors import WordVectors
from tests.file_operations import operations_outside

COUNT = int(os.environ.get("CLEARHEAD_MUTATIONS", "200"))
TEXTS, LABELS = ["cat cat sat", "dog sat", "cat dog mat"], ["x", "y", "x"]
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2, 1 << 70, 0.5, "", "cat", "a\0b", "\ud800", [], {}, [1], ["cat"], ["cat"] * 4, [[]]),
    *("/etc/passwd", ["x", "y"], ["y", "x"], ["x"] * 2, {"a": 1}, "x" * 5000),
]
DTYPES = [torch.float64, torch.float16, torch.float8_e5m2, torch.int8, torch.int64, torch.bool, torch.complex64]


def use_vectors(folder: Path) -> None:
    vectors = WordVectors.load(folder)
    for word, _ in vectors.neighbors(vectors.words[0], 2):
        vectors.similarity(word, vectors.words[0])
        word.encode()


def use_classifier(folder: Path) -> None:
    model = LinearClassifier.load(folder)
    assert len(model.predict(TEXTS)) == len(TEXTS)
    model.probabilities(TEXTS).tolist()


def change_tensors(tensors: dict[str, Any], data: dict[str, Any], rng: random.Random) -> tuple[Any, Any]:
    """Change the JSON object or a tensor."""
    if rng.random() < 0.5:
        data[rng.choice([*data, "new"])] = rng.choice(VALUES)
        return tensors, data
    name = rng.choice([*tensors])
    tensor = tensors[name]
    tensors[name] = rng.choice(
        [
            lambda: tensor.to(rng.choice(DTYPES)),
            lambda: tensor[:-1],
            lambda: tensor[:0],
            lambda: tensor[None],
            lambda: tensor.flatten(),
            lambda: torch.zeros(()),
            lambda: tensor * torch.nan,
            lambda: tensor * 1e30,
            lambda: torch.cat([tensor, tensor]),
        ]
    )()
    if rng.random() < 0.2:
        del tensors[name]
    return tensors, data


def change_bytes(data: bytearray, rng: random.Random) -> bytearray:
    """Change the header of a safetensors file, its length, or any bytes."""
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        return bytearray(struct.pack("<Q", rng.choice([0, 1, 1 << 20, 1 << 40, (1 << 64) - 1]))) + data[8:]
    if kind == 2:
        size = struct.unpack_from("<Q", data)[0]
        header = json.loads(data[8 : 8 + size])
        entry = header[rng.choice([*header])]
        entry[rng.choice(["dtype", "shape", "data_offsets", "x"])] = rng.choice(
            [*VALUES, "F32", "F8_E8M0", "F4", "U8", "C64", [1 << 40], [0, 1 << 40], [-1, 4], [0, 4]]
        )
        text = json.dumps(header).encode()
        return bytearray(struct.pack("<Q", len(text))) + text + data[8 + size :]
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(min(len(data), 400))] = rng.randrange(256)
    return data


@pytest.mark.parametrize("kind", ["vectors", "classifier"])
def test_changed_files_never_give_a_traceback_or_touch_other_files(kind: str, tmp_path: Path) -> None:
    folder, rng, refused = tmp_path / kind, random.Random(0), 0
    use: Callable[[Path], None] = {"vectors": use_vectors, "classifier": use_classifier}[kind]
    if kind == "vectors":
        WordVectors(["cat", "dog", "sat", "mat"], torch.eye(4)).save(folder)
        tensors: dict[str, Any] = {"vectors": torch.eye(4)}
        data: dict[str, Any] = {"words": ["cat", "dog", "sat", "mat"]}
    else:
        model = LinearClassifier.fit(TEXTS, LABELS, BagOfWords.fit(TEXTS))
        model.save(folder)
        tensors = {"weight": model.weight, "bias": model.bias, "weights": model.bag.idf}
        data = {"labels": ["x", "y"], "ngrams": 1, "words": list(model.bag.vocab)}
    [file] = folder.iterdir()
    original = file.read_bytes()
    use(folder)
    for number in range(COUNT // 2):
        if rng.random() < 0.5:
            changed, changed_data = change_tensors(dict(tensors), dict(data), rng)
            save_tensors(file, changed, changed_data)
        else:
            file.write_bytes(change_bytes(bytearray(original), rng))
        with operations_outside(folder) as outside:
            try:
                use(folder)
            except UserError as error:
                refused += "\n" not in str(error)
            except Exception as error:
                raise AssertionError(f"{number}: {file.read_bytes()!r:.3000}") from error
        assert not outside
    assert refused > COUNT / 8
    print(f"{kind}: {COUNT // 2} changed files, {refused} refused in one line, 0 tracebacks, 0 operations outside")
