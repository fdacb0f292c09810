"""What the tests of data share: small texts, tokenizers of every kind, settings with a cache of their own."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from clearhead.config.data import DataConfig, TokenizerConfig
from clearhead.data import Batch, Data, Dataset, Loader, from_records, prepare
from clearhead.text import ROLES, Kind, Tokenizer, train

LINES = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "Die Katze saß auf der Matte. Ärger über Öl!",
    "猫坐在垫子上。狗坐在猫上。",
    "It isn't 3.14159; it's 2.71828…",
    "A small black bird sings in the old garden behind our house every morning.",
    "the quick brown fox jumps over the lazy dog 0123456789",
]
WORDS = """the a cat dog bird fox sat ran sang on in under mat tree house old small black red green""".split()  # noqa: SIM905


@cache
def tokenizer(kind: Kind = "byte-bpe", size: int = 400) -> Tokenizer:
    """A small tokenizer that has every special token."""
    return train(["\n".join([*LINES, " ".join(WORDS)])] * 10, kind, size, roles=ROLES)


def write(path: Path, lines: Iterable[str]) -> str:
    """Write lines to a file; returns its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def config(folder: Path, task: str, **settings: Any) -> DataConfig:
    """Settings whose cache lies in `folder`."""
    return DataConfig.build({"task": task, "cache_dir": str(folder / "cache"), **settings})


def prepared(folder: Path, task: str, **settings: Any) -> Data:
    """Data sets with a small byte-level tokenizer and a cache in `folder`."""
    return prepare(config(folder, task, **settings), [tokenizer()])


def dataset(task: str, records: Iterable[Sequence[Any]], kind: Kind = "byte-bpe", **settings: Any) -> Dataset:
    """A data set of records in memory."""
    labels = settings.pop("labels", ())
    return from_records(DataConfig.build({"task": task, **settings}), records, [tokenizer(kind)], labels)


def sentences(count: int, least: int = 1, most: int = 12) -> list[str]:
    """Different sentences of many lengths; the number in front keeps them apart."""
    return [
        f"{n} "
        + " ".join(WORDS[(n * 7 + k * (1 + n % 5)) % len(WORDS)] for k in range(least + n * 13 % (most + 1 - least)))
        for n in range(count)
    ]


def pairs(count: int) -> list[tuple[str, str]]:
    """Sentence pairs whose sides differ in length."""
    return list(zip(sentences(count), sentences(count, 2, 9)[::-1], strict=True))


def epoch(data: Dataset, number: int = 0, **settings: Any) -> list[list[int]]:
    """The samples of one epoch's batches."""
    found = []
    for step in Loader(data, workers=0, **settings):
        if step.plan.epoch > number:
            break
        if step.plan.epoch == number:
            found.append(step.plan.samples.tolist())
    return found


def steps(data: Dataset, count: int, **settings: Any) -> list[Any]:
    """The first steps of a loader."""
    iterator = iter(Loader(data, **settings))
    try:
        return list(islice(iterator, count))
    finally:
        iterator.close()  # type: ignore[attr-defined]


def equal(one: Batch, other: Batch) -> bool:
    """Whether two batches have the same tensors and documents."""
    return (
        one.tokens == other.tokens
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(one[name], other[name]) for name in one.tensors)
        and {name: found.lengths.tolist() for name, found in one.documents.items()}
        == {name: found.lengths.tolist() for name, found in other.documents.items()}
    )


def samples_of(batch: Batch, side: str) -> list[list[int]]:
    """The rows of one side without padding, whether the batch is padded or packed."""
    name = {"labels": "target" if "target" in batch.tensors else "ids", "segments": "ids"}.get(side, side)
    if batch.documents:
        return [part.tolist() for part in batch[side][0].split(batch.documents[name].lengths.tolist())]
    lengths = batch[f"{name}_lengths"].tolist()
    return [row[:length] for row, length in zip(batch[side].tolist(), lengths, strict=True)]


def leftovers(cache_folder: Path) -> list[str]:
    """Stores, tokenizers and temporary files in a cache (not locks, nor notes about files seen)."""
    found = [path.relative_to(cache_folder) for path in cache_folder.rglob("*")]
    return [str(path) for path in found if len(path.parts) > 1 and path.parts[0] != "seen" and path.suffix != ".lock"]


SMALL = TokenizerConfig(kind="byte-bpe", vocab_size=300)
