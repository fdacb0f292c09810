"""Records that the package makes itself: the embedded grammar, and symbols to copy or to reverse."""

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
from clearhead.data.formats import ALL_ANSWERS, ANSWERS, PAIR, TAGS, TEXT, TRANSLATION, Place, Record
from clearhead.data.random import below
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.data.grammar import Example, Grammar

LABELS = ("tense", "sentiment")
HEAP = 1000  # sentences, of which those that are like one another make a text to ask about


def records(corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """`count` records for a task that reads `columns`."""
    if corpus.format == "symbols":
        return _symbols(corpus, columns)
    return _embedded(corpus, columns)


def _embedded(corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    from clearhead.data.grammar import Grammar, together  # reads its lexicon, which nobody else needs

    grammar = Grammar(corpus.level)
    source, target = corpus.languages[0], corpus.languages[-1]
    label = str(corpus.columns.get("label", LABELS[0]))
    if "label" in columns and label not in LABELS:
        raise UserError(f"columns: the embedded corpus has the labels {' and '.join(LABELS)}, not {label!r}")
    if columns in (ANSWERS, ALL_ANSWERS):
        yield from _asked(corpus, grammar, source, columns == ALL_ANSWERS)
        return
    if columns == TEXT:
        for index, group in _groups(corpus, grammar):
            yield Record(_place(corpus, index), (together(group, source),))
        return
    for index in range(corpus.count):
        example = grammar.example(corpus.split, index, corpus.seed)
        yield Record(_place(corpus, index), _values(example, columns, source, target, label))


def _place(corpus: Corpus, index: int) -> Place:
    return Place(f"embedded level {corpus.level} {corpus.split}", index, "sentence")


def _groups(corpus: Corpus, grammar: "Grammar") -> Iterator[tuple[int, list["Example"]]]:
    """One to `sentences` sentences at a time, and the number of the first."""
    index = 0
    while index < corpus.count:
        size = min(1 + int(below(corpus.sentences, corpus.seed, index)), corpus.count - index)
        yield index, [grammar.example(corpus.split, index + n, corpus.seed) for n in range(size)]
        index += size


def _asked(corpus: Corpus, grammar: "Grammar", language: Language, references: bool) -> Iterator[Record]:
    """Texts of some sentences with a question each, which one of them answers or none."""
    from clearhead.data.grammar.asking import ask

    for start in range(0, corpus.count, HEAP):
        numbers = range(start, min(start + HEAP, corpus.count))
        heap = [grammar.example(corpus.split, number, corpus.seed) for number in numbers]
        dice = Random(f"{corpus.seed} {corpus.split} {start} asked")
        for number, text, questions in ask(heap, language, corpus.sentences, dice):
            for question in questions:
                every = [[question.answer] if question.answer else []] if references else []
                values = (text, question.text, question.answer, question.start, *every)
                yield Record(_place(corpus, start + number), values)


def _values(
    example: "Example", columns: tuple[str, ...], source: Language, target: Language, label: str
) -> tuple[Any, ...]:
    """What a task reads of one sentence."""
    if columns in (TRANSLATION, PAIR):  # a sentence and its translation say the same
        return example.text(source), example.text(target)
    if columns == (*TEXT, "label"):
        return example.text(source), getattr(example, label)
    if columns == TAGS:
        words, tags = list(example.words(source)), ["O"] * len(example.words(source))
        for first, behind, kind in example.entities(source):
            tags[first:behind] = [f"B-{kind}", *[f"I-{kind}"] * (behind - first - 1)]
        return words, tags
    raise UserError("format: the embedded corpus has no labeled pairs of texts; use another one for this task")


def _symbols(corpus: Corpus, columns: tuple[str, ...]) -> Iterator[Record]:
    """Sequences of letters (numbers beyond 26); no sequence of one split is in another."""
    if columns != TRANSLATION:
        raise UserError("format: symbols are for translation; this task reads " + ", ".join(columns))
    names = [chr(ord("a") + n) if corpus.symbols <= 26 else str(n) for n in range(corpus.symbols)]
    made = 0
    for index, drawn in enumerate(_sequences(corpus, names)):
        if made == corpus.count:
            return
        if _split(drawn) == corpus.split:
            made += 1
            wanted = drawn if corpus.order == "copy" else drawn[::-1]
            yield Record(Place(f"symbols {corpus.split}", made, "sequence"), (" ".join(drawn), " ".join(wanted)))
        elif index > 1000 * (made + 10):
            raise UserError(f"symbols: too few sequences for the split {corpus.split}; use more symbols or lengths")


def _sequences(corpus: Corpus, names: list[str]) -> Iterator[list[str]]:
    """Endless random sequences, drawn many at once for speed; each depends on its number alone."""
    many = max(1, (1 << 16) // corpus.max_length)
    for start in count(0, many):
        numbers = np.arange(start, start + many)
        lengths = corpus.min_length + below(corpus.max_length - corpus.min_length + 1, corpus.seed, numbers, 0)
        drawn = below(corpus.symbols, corpus.seed, numbers[:, None], np.arange(1, corpus.max_length + 1))
        yield from ([names[n] for n in row[:length]] for row, length in zip(drawn.tolist(), lengths, strict=True))


def _split(drawn: list[str]) -> str:
    """The split that a sequence belongs to: of a hundred, 96 for training, 2 each for the others."""
    number = hashlib.blake2b(" ".join(drawn).encode(), digest_size=1).digest()[0]
    return "valid" if number < 5 else "test" if number < 10 else "train"


@cache
def grammar_version() -> str:
    """A digest of everything that decides what the embedded grammar says."""
    found = hashlib.sha256(Path(__file__).read_bytes())
    folders = [resources.files("clearhead.data") / "grammar"]
    while folders:
        for entry in sorted(folders.pop().iterdir(), key=lambda each: each.name):
            if entry.is_dir():
                if entry.name != "__pycache__":
                    folders.append(entry)
            elif not entry.name.endswith(".pyc"):
                found.update(entry.read_bytes())
    return found.hexdigest()
