"""Synthetic data: sentences of the embedded grammar, and symbol sequences to copy or reverse."""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.config.data import Corpus, Language
from clearhead.data.formats import ANSWERS, ANSWERS_WITH_REFERENCES, PAIR, TAGS, TEXT, TRANSLATION, Location, Record
from clearhead.data.random import randint
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.data.grammar import Example, Grammar

LABEL_NAMES = ("tense", "sentiment")  # values of columns.label
QUESTION_POOL = 1000  # sentences per pool; similar ones form a context


def records(corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """Yield the records of a synthetic corpus."""
    if corpus.format == "symbols":
        return _symbols(corpus, columns)
    return _embedded(corpus, columns)


def _embedded(corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    from clearhead.data.grammar import Grammar, together  # loads the lexicon

    grammar = Grammar(corpus.level)
    source, target = corpus.languages[0], corpus.languages[-1]
    label = str(corpus.columns.get("label", LABEL_NAMES[0]))
    if "label" in columns and label not in LABEL_NAMES:
        raise UserError(f"columns: the embedded corpus has the labels {' and '.join(LABEL_NAMES)}, not {label!r}")
    if columns in (ANSWERS, ANSWERS_WITH_REFERENCES):
        yield from _question_records(corpus, grammar, source, columns == ANSWERS_WITH_REFERENCES)
        return
    if columns == TEXT:
        for index, sentences in _texts(corpus, grammar):
            yield Record(_location(corpus, index), (together(sentences, source),))
        return
    for index in range(corpus.count):
        example = grammar.example(corpus.split, index, corpus.seed)
        yield Record(_location(corpus, index), _values(example, columns, source, target, label))


def _location(corpus: Corpus, index: int) -> Location:
    return Location(f"embedded level {corpus.level} {corpus.split}", index, "sentence")


def _texts(corpus: Corpus, grammar: "Grammar") -> Iterator[tuple[int, list["Example"]]]:
    """Yield texts of 1 to `corpus.sentences` sentences, with the index of the first."""
    index = 0
    while index < corpus.count:
        size = min(1 + int(randint(corpus.sentences, corpus.seed, index)), corpus.count - index)
        yield index, [grammar.example(corpus.split, index + n, corpus.seed) for n in range(size)]
        index += size


def _question_records(corpus: Corpus, grammar: "Grammar", language: Language, references: bool) -> Iterator[Record]:
    """Yield contexts with questions, answerable or not."""
    from clearhead.data.grammar.asking import ask

    for start in range(0, corpus.count, QUESTION_POOL):
        indices = range(start, min(start + QUESTION_POOL, corpus.count))
        pool = [grammar.example(corpus.split, index, corpus.seed) for index in indices]
        rng = Random(f"{corpus.seed} {corpus.split} {start} asked")
        for index, text, questions in ask(pool, language, corpus.sentences, rng):
            for question in questions:
                answers = [[question.answer] if question.answer else []] if references else []
                values = (text, question.text, question.answer, question.start, *answers)
                yield Record(_location(corpus, start + index), values)


def _values(
    example: "Example", columns: tuple[str, ...], source: Language, target: Language, label: str
) -> tuple[Any, ...]:
    """Return the values of one sentence for the columns of a task."""
    if columns in (TRANSLATION, PAIR):  # a translation is a similar sentence
        return example.text(source), example.text(target)
    if columns == (*TEXT, "label"):
        return example.text(source), getattr(example, label)
    if columns == TAGS:
        words, tags = list(example.words(source)), ["O"] * len(example.words(source))
        for start, end, entity in example.entities(source):
            tags[start:end] = [f"B-{entity}", *[f"I-{entity}"] * (end - start - 1)]
        return words, tags
    raise UserError("format: the embedded corpus has no labeled pairs of texts; use another one for this task")


def _symbols(corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """Yield sequences of letters (numbers for more than 26 symbols); splits share no sequence."""
    if columns != TRANSLATION:
        raise UserError("format: symbols are for translation; this task reads " + ", ".join(columns))
    names = [chr(ord("a") + n) if corpus.symbols <= 26 else str(n) for n in range(corpus.symbols)]
    made = 0
    for index, source in enumerate(_sequences(corpus, names)):
        if made == corpus.count:
            return
        if _split_of(source) == corpus.split:
            made += 1
            target = source if corpus.order == "copy" else source[::-1]
            yield Record(Location(f"symbols {corpus.split}", made, "sequence"), (" ".join(source), " ".join(target)))
        elif index > 1000 * (made + 10):
            raise UserError(f"symbols: too few sequences for the split {corpus.split}; use more symbols or lengths")


def _sequences(corpus: Corpus, names: list[str]) -> Iterator[list[str]]:
    """Yield endless random sequences, drawn in blocks for speed; each is a function of its index."""
    block = max(1, (1 << 16) // corpus.max_length)
    for start in count(0, block):
        indices = np.arange(start, start + block)
        lengths = corpus.min_length + randint(corpus.max_length - corpus.min_length + 1, corpus.seed, indices, 0)
        symbols = randint(corpus.symbols, corpus.seed, indices[:, None], np.arange(1, corpus.max_length + 1))
        yield from ([names[n] for n in row[:length]] for row, length in zip(symbols.tolist(), lengths, strict=True))


def _split_of(sequence: list[str]) -> str:
    """Return the split of a sequence by its hash: 96% train, 2% valid, 2% test."""
    number = hashlib.blake2b(" ".join(sequence).encode(), digest_size=1).digest()[0]
    return "valid" if number < 5 else "test" if number < 10 else "train"


@cache
def grammar_version() -> str:
    """Return a digest of all code and tables that determine the embedded corpus."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    folders = [resources.files("clearhead.data") / "grammar"]
    while folders:
        for entry in sorted(folders.pop().iterdir(), key=lambda path: path.name):
            if entry.is_dir():
                if entry.name != "__pycache__":
                    folders.append(entry)
            elif not entry.name.endswith(".pyc"):
                digest.update(entry.read_bytes())
    return digest.hexdigest()
