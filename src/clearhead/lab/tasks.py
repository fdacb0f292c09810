"""Data of the experiments as tensors: text, translations, sentences with labels, and synthetic sequences.

N examples · T tokens. Every function is deterministic; corpora are read from CLEARHEAD_DATA, see `clearhead data`.
"""

import csv
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.data.public_datasets import download_folder
from clearhead.errors import UserError
from clearhead.files import read_lines
from clearhead.lab.ensemble import IGNORE, Batch
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.train_tokenizer import train as train_tokenizer

PAD, BEGIN, END = 0, 1, 2  # ids of the special tokens in every task
SPECIAL = 3


class Data(NamedTuple):
    """Training, validation and test examples, and the size of the vocabulary."""

    train: Batch
    valid: Batch
    test: Batch
    vocab_size: int


def split(batch: Batch, vocab_size: int, valid: int = 512, test: int = 1024) -> Data:
    """Take validation and test examples from the end."""
    count = len(batch["labels"])
    cuts = (0, count - valid - test, count - test, count)
    parts = [{name: values[begin:end] for name, values in batch.items()} for begin, end in pairwise(cuts)]
    return Data(parts[0], parts[1], parts[2], vocab_size)


def corpus(path: str) -> list[str]:
    """Return the lines of a corpus file."""
    full = download_folder() / path
    if not full.exists():
        name = path.partition("/")[0]
        raise UserError(
            f"{full} is missing; set CLEARHEAD_DATA to the folder with the corpora, or see: clearhead data {name}"
        )
    return list(read_lines(full))


# Language modeling


def windows(ids: Tensor, length: int) -> Batch:
    """Cut a text into rows of `length` tokens that predict the next token: ids and labels (N, T)."""
    rows = (len(ids) - 1) // length
    inputs, labels = (ids[shift : shift + rows * length].view(rows, length) for shift in (0, 1))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return {"ids": inputs[order], "labels": labels[order]}


@cache
def shakespeare() -> tuple[Tensor, int]:
    """Return tiny Shakespeare as character ids, and the number of characters."""
    text = "\n".join(corpus("tinyshakespeare/input.txt"))
    letters = sorted(set(text))
    table = {letter: index for index, letter in enumerate(letters)}
    return torch.tensor([table[letter] for letter in text]), len(letters)


@cache
def characters(length: int) -> Data:
    """Return a character language model's data: tiny Shakespeare in windows of `length`."""
    ids, size = shakespeare()
    return split(windows(ids, length), size, 256, 512)


def prefixes(batch: Batch) -> Batch:
    """Only the last position of each row is predicted: what a model sees when it generates."""
    labels = torch.full_like(batch["labels"], IGNORE)
    labels[:, -1] = batch["labels"][:, -1]
    return batch | {"labels": labels}


# Translation


class Translation(NamedTuple):
    """Translation data, its tokenizer, and the test references as text."""

    data: Data
    tokenizer: Tokenizer
    references: list[str]


@cache
def tatoeba(pairs: int, length: int = 14, vocab_size: int = 2000, test: int = 512) -> Translation:
    """Return English to German from Tatoeba: at most `length` tokens, one translation for each English sentence."""
    unique: dict[str, str] = {}
    for line in corpus("tatoeba_en_de/deu.txt.gz"):
        source, _, target = line.partition("\t")
        unique.setdefault(source, target.partition("\t")[0])
    rows = list(unique.items())
    random.Random(0).shuffle(rows)
    rows = rows[: 2 * pairs]  # about half are too long
    tokenizer = train_tokenizer((text for pair in rows[:40_000] for text in pair), "bpe", vocab_size)
    assert [tokenizer.id("pad"), tokenizer.id("begin"), tokenizer.id("end")] == [PAD, BEGIN, END]
    sources, targets = (tokenizer.encode_batch([pair[side] for pair in rows]) for side in (0, 1))
    kept = [i for i in range(len(rows)) if max(len(sources[i]), len(targets[i])) < length][:pairs]
    batch = translation_batch([sources[i] for i in kept], [targets[i] for i in kept], length)
    data = split(batch, len(tokenizer), 256, test)
    return Translation(data, tokenizer, [rows[i][1] for i in kept[-test:]])


def translation_batch(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], length: int) -> Batch:
    """Return a padded batch: the decoder reads BEGIN and the target, and predicts the target and END."""
    return {
        "source": padded(sources, length),
        "source_lengths": torch.tensor([len(row) for row in sources]),
        "ids": padded([[BEGIN, *row] for row in targets], length),
        "labels": padded([[*row, END] for row in targets], length, IGNORE),
    }


def padded(rows: Sequence[Sequence[int]], length: int, value: int = PAD) -> Tensor:
    """Pad rows to (N, length)."""
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])


def until_end(ids: Sequence[int]) -> list[int]:
    """Cut a generated row at END."""
    row = list(ids)
    return row[: row.index(END)] if END in row else row


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU-4 of a corpus with one reference each, over words and punctuation marks (Papineni et al. 2002)."""
    tokens = [[re.findall(r"\w+|[^\w\s]", text) for text in texts] for texts in (hypotheses, references)]
    matches, totals = [0] * 4, [0] * 4
    for hypothesis, reference in zip(*tokens, strict=True):
        for n in range(4):
            ours, theirs = (
                Counter(tuple(row[i : i + n + 1]) for i in range(len(row) - n)) for row in (hypothesis, reference)
            )
            matches[n] += (ours & theirs).total()
            totals[n] += ours.total()
    if not all(matches):
        return 0.0
    lengths = [sum(map(len, rows)) for rows in tokens]
    brevity = min(0.0, 1 - lengths[1] / lengths[0])
    precision = sum(math.log(match / total) for match, total in zip(matches, totals, strict=True)) / 4
    return 100 * math.exp(brevity + precision)


# Sentences with labels


@cache
def labeled(name: str, vocab_size: int = 3000, length: int = 32) -> tuple[Data, list[str]]:
    """Return sentences and labels of sst2, trec_qc or cola: [BEGIN, tokens], the label predicted at BEGIN."""
    texts, labels = _read_labeled(name)
    names = sorted(set(labels))
    order = _shuffled(len(texts))
    tokenizer = labeled_tokenizer(name, vocab_size)
    rows = [[BEGIN, *tokenizer.encode(texts[i])][:length] for i in order]
    return split(sentence_batch(rows, [names.index(labels[i]) for i in order], length), len(tokenizer)), names


@cache
def labeled_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of `labeled`."""
    texts, _ = _read_labeled(name)
    return train_tokenizer((texts[i] for i in _shuffled(len(texts))[:20_000]), "wordpiece", vocab_size, lowercase=True)


def _shuffled(count: int) -> list[int]:
    order = list(range(count))
    random.Random(0).shuffle(order)
    return order


def shuffled_or_not(batch: Batch, vocab_size: int) -> Data:
    """Return the same sentences with the words of every second one shuffled; the label says which."""
    generator = torch.Generator().manual_seed(0)
    ids, lengths = batch["ids"].clone(), batch["lengths"]
    for row in range(0, len(ids), 2):
        order = 1 + torch.randperm(int(lengths[row]) - 1, generator=generator)
        ids[row, 1 : lengths[row]] = ids[row, order]
    labels = torch.full_like(ids, IGNORE)
    labels[:, 0] = torch.arange(len(ids)) % 2
    return split({"ids": ids, "lengths": lengths, "labels": labels}, vocab_size)


def sentence_batch(rows: Sequence[Sequence[int]], classes: Sequence[int], length: int) -> Batch:
    """Return padded rows with one label at the first position."""
    labels = torch.full((len(rows), length), IGNORE)
    labels[:, 0] = torch.tensor(classes)
    return {"ids": padded(rows, length), "lengths": torch.tensor([len(row) for row in rows]), "labels": labels}


def _read_labeled(name: str) -> tuple[list[str], list[str]]:
    if name == "trec_qc":
        rows = [line.partition(" ") for line in corpus("trec_qc/train.txt") if line]
        return [text for _, _, text in rows], [label.partition(":")[0] for label, _, _ in rows]
    if name == "cola":
        fields = list(csv.reader(corpus("cola/in_domain_train.tsv"), delimiter="\t", quoting=csv.QUOTE_NONE))
        return [row[3] for row in fields], [row[1] for row in fields]
    fields = list(csv.reader(corpus("sst2/train.tsv.gz")[1:], delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row[0] for row in fields], [row[1] for row in fields]


def masked(batch: Batch, vocab_size: int, share: float = 0.15) -> Batch:
    """Return masked-language-model data: a share of the tokens replaced by id `vocab_size`, to be predicted."""
    ids, lengths = batch["ids"], batch["lengths"]
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < share
    chosen &= (torch.arange(ids.shape[1]) < lengths[:, None]) & (torch.arange(ids.shape[1]) > 0)
    return {"ids": ids.masked_fill(chosen, vocab_size), "lengths": lengths, "labels": ids.masked_fill(~chosen, IGNORE)}


@cache
def tagged(vocab_size: int, length: int = 24) -> tuple[Data, list[str]]:
    """Return CoNLL-2003 as words with entity tags, and the names of the tags; rare words become their shape."""
    sentences: list[list[tuple[str, str]]] = [[]]
    for line in corpus("conll2003_en/train.txt.gz"):
        if line.strip():
            word, _, tag = line.rpartition(" ")
            sentences[-1].append((word.partition(" ")[0], tag))
        elif sentences[-1]:
            sentences.append([])
    rows = [sentence[:length] for sentence in sentences if len(sentence) > 2]
    random.Random(0).shuffle(rows)
    counts = Counter(word for row in rows for word, _ in row)
    words = [word for word, _ in counts.most_common(vocab_size - SPECIAL - 4)]
    table = {word: SPECIAL + 4 + index for index, word in enumerate(words)}
    tags = sorted({tag for row in rows for _, tag in row})

    def shape(word: str) -> int:
        return SPECIAL + (0 if word.isdigit() else 1 if word.isupper() else 2 if word[:1].isupper() else 3)

    batch = {
        "ids": padded([[table.get(word, shape(word)) for word, _ in row] for row in rows], length),
        "lengths": torch.tensor([len(row) for row in rows]),
        "labels": padded([[tags.index(tag) for _, tag in row] for row in rows], length, IGNORE),
    }
    return split(batch, vocab_size), tags


@cache
def sentence_pairs(pairs: int, length: int = 32) -> Data:
    """Return pairs of lines of Shakespeare, [BEGIN, first, END, second]: label 1 if they are neighbors, else 0."""
    lines = [line for line in corpus("tinyshakespeare/input.txt") if len(line.split()) > 3]
    tokenizer = train_tokenizer(lines[:20_000], "bpe", 1000)
    rng = random.Random(0)
    rows, labels = [], []
    encoded = tokenizer.encode_batch(lines)
    for index in rng.choices(range(len(lines) - 1), k=pairs):
        labels.append(rng.randint(0, 1))
        second = encoded[index + 1] if labels[-1] else rng.choice(encoded)
        rows.append([BEGIN, *encoded[index][: length // 2 - 2], END, *second[: length // 2]])
    return split(sentence_batch(rows, labels, length), len(tokenizer))


@cache
def byte_pairs(vocab_size: int, row_bytes: int) -> tuple[Data, float]:
    """Return tiny Shakespeare in `vocab_size` byte-level tokens, rows of about `row_bytes`, and the bytes per token."""
    text = "\n".join(corpus("tinyshakespeare/input.txt"))
    if vocab_size <= 256:
        ids = torch.tensor(list(text.encode()))
        return split(windows(ids, row_bytes), 256, 256, 512), 1.0
    tokenizer = train_tokenizer(text.splitlines(keepends=True), "byte-bpe", vocab_size)
    ids = torch.tensor(tokenizer.encode(text))
    ratio = len(text.encode()) / len(ids)
    return split(windows(ids, max(4, round(row_bytes / ratio))), len(tokenizer), 256, 512), ratio


# Synthetic sequences


def copying(length: int, rows: int = 6000, symbols: int = 16) -> Data:
    """Return random symbols, END, and the same symbols to be predicted: every answer is `length` tokens back."""
    first = torch.randint(SPECIAL, SPECIAL + symbols, (rows, length), generator=torch.Generator().manual_seed(length))
    ids = torch.cat([first, torch.full((rows, 1), END), first[:, :-1]], 1)
    labels = torch.cat([torch.full((rows, length), IGNORE), first], 1)
    return split({"ids": ids, "labels": labels}, SPECIAL + symbols, 256, 512)
