"""Helpers of the data tests: small texts, tokenizers of every kind, settings with their own cache."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from clearhead.config.data import DataConfig
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
    """Train a small tokenizer with all special tokens."""
    return train(["\n".join([*LINES, " ".join(WORDS)])] * 10, kind, size, roles=ROLES)


def write(path: Path, lines: Iterable[str]) -> str:
    """Write lines to a file; return its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def config(folder: Path, task: str, **settings: Any) -> DataConfig:
    """Return data settings with a cache in `folder`."""
    return DataConfig.build({"task": task, "cache_dir": str(folder / "cache"), **settings})


def prepared(folder: Path, task: str, **settings: Any) -> Data:
    """Build datasets with a small byte-level tokenizer and a cache in `folder`."""
    return prepare(config(folder, task, **settings), [tokenizer()])


def dataset(task: str, records: Iterable[Sequence[Any]], kind: Kind = "byte-bpe", **settings: Any) -> Dataset:
    """Build a dataset from records in memory."""
    labels = settings.pop("labels", ())
    return from_records(DataConfig.build({"task": task, **settings}), records, [tokenizer(kind)], labels)


def sentences(count: int, min_words: int = 1, max_words: int = 12) -> list[str]:
    """Return distinct sentences of many lengths; each starts with its number."""
    lengths = [min_words + n * 13 % (max_words + 1 - min_words) for n in range(count)]
    return [
        f"{n} " + " ".join(WORDS[(n * 7 + k * (1 + n % 5)) % len(WORDS)] for k in range(length))
        for n, length in enumerate(lengths)
    ]


def pairs(count: int) -> list[tuple[str, str]]:
    """Return sentence pairs whose sides differ in length."""
    return list(zip(sentences(count), sentences(count, 2, 9)[::-1], strict=True))


def loader(
    data: Dataset,
    batch_tokens: int,
    *,
    bucket_size: int = 1 << 15,
    world_size: int = 1,
    grad_accum: int = 1,
    **settings: Any,
) -> Loader:
    """Return a loader."""
    return Loader(
        data,
        batch_tokens=batch_tokens,
        bucket_size=bucket_size,
        world_size=world_size,
        grad_accum=grad_accum,
        **settings,
    )


def epoch(data: Dataset, number: int = 0, **settings: Any) -> list[list[int]]:
    """Return the samples of each batch of one epoch."""
    batches = []
    for step in loader(data, workers=0, **settings):
        if step.plan.epoch > number:
            break
        if step.plan.epoch == number:
            batches.append(step.plan.samples.tolist())
    return batches


def first_batches(data: Dataset, count: int, **settings: Any) -> list[Any]:
    """Return the first global batches of a loader."""
    iterator = iter(loader(data, **settings))
    try:
        return list(islice(iterator, count))
    finally:
        iterator.close()  # type: ignore[attr-defined]


def equal(one: Batch, other: Batch) -> bool:
    """Return whether two batches have the same tensors and documents."""
    return (
        one.num_tokens == other.num_tokens
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(one[name], other[name]) for name in one.tensors)
        and {side: docs.lengths.tolist() for side, docs in one.documents.items()}
        == {side: docs.lengths.tolist() for side, docs in other.documents.items()}
    )


def samples_of(batch: Batch, side: str) -> list[list[int]]:
    """Return the rows of one field without padding, from a padded or packed batch."""
    name = {"labels": "target" if "target" in batch.tensors else "ids", "segments": "ids"}.get(side, side)
    if batch.documents:
        return [part.tolist() for part in batch[side][0].split(batch.documents[name].lengths.tolist())]
    lengths = batch[f"{name}_lengths"].tolist()
    return [row[:length] for row, length in zip(batch[side].tolist(), lengths, strict=True)]


def leftovers(cache_folder: Path) -> list[str]:
    """List stores, tokenizers and temporary files in a cache (not locks or file digests)."""
    paths = [path.relative_to(cache_folder) for path in cache_folder.rglob("*")]
    return [str(path) for path in paths if len(path.parts) > 1 and path.parts[0] != "seen" and path.suffix != ".lock"]
