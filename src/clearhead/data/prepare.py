"""From settings to data sets: reads what is named, trains the tokenizer if there is none, fills and finds the cache."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from clearhead.config.data import Corpus, DataConfig, TokenizerConfig
from clearhead.data import synthetic
from clearhead.data.clean import Cleaner, Part, chunks
from clearhead.data.dataset import Dataset
from clearhead.data.formats import TEXTS, Place, Record, find, paths, read
from clearhead.data.labeled import Answering, Classification, Regression, Similarity, Tagging
from clearhead.data.masking import MaskedLanguageModel
from clearhead.data.store import Store, Writer, build, build_temporary, cache_folder, content, full_disk, key
from clearhead.data.tasks import LanguageModel, Task, Translation, documents
from clearhead.errors import UserError
from clearhead.files import locked, read_text, write_text
from clearhead.text import Tokenizer, load_folder, train

TASKS: dict[str, type[Task]] = {
    "translation": Translation,
    "language-model": LanguageModel,
    "masked-language-model": MaskedLanguageModel,
    "classification": Classification,
    "regression": Regression,
    "tagging": Tagging,
    "answering": Answering,
    "similarity": Similarity,
}
# Settings that decide what a batch looks like, not what is in the cache.
BATCHING = {"train", "valid", "test", "held_out", "published", "boundaries", "masked", "whole_word_masking"}
BATCHING |= {"tokens", "packed", "pool", "workers", "cache", "pooling", "swap_pairs"}  # a store's key says the last

LABELS = 10_000  # more are a text taken for a label

Say = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """Data sets ready for training, and what a model folder has to know about them."""

    train: Dataset
    valid: Dataset | None
    task: Task
    tokenizers: tuple[Tokenizer, ...]  # one, or the source's and the target's
    labels: tuple[str, ...]


def prepare(
    config: DataConfig,
    tokenizer: TokenizerConfig | Sequence[Tokenizer],
    labels: Sequence[str] = (),
    say: Say = lambda line: None,
) -> Data:
    """Everything that training needs; `say` is told, a line at a time, what takes long.

    `tokenizer` is how to get one, or those that a model already has; so are `labels`.
    """
    if not config.train:
        raise UserError("data.train: missing; name the training files")
    maker = _Maker(config, say)
    tokenizers = maker.tokenizers(tokenizer) if isinstance(tokenizer, TokenizerConfig) else tuple(tokenizer)
    names = tuple(labels or config.labels or maker.labels())
    split: Part = "kept" if config.held_out and not config.valid else "all"
    train_set = maker.dataset(config.train, tokenizers, names, split, config.swap_pairs)
    if config.valid:
        valid_set: Dataset | None = maker.dataset(config.valid, tokenizers, names, "all")
    else:
        valid_set = maker.dataset(config.train, tokenizers, names, "held out") if config.held_out else None
    return Data(train_set, valid_set, train_set.task, tokenizers, names)


def open_set(
    config: DataConfig,
    corpora: Sequence[Corpus],
    tokenizers: Sequence[Tokenizer],
    labels: Sequence[str] = (),
    say: Say = lambda line: None,
) -> Dataset:
    """A data set of any corpora, for a model that has its tokenizers already: a test set."""
    return _Maker(config, say).dataset(corpora, tokenizers, tuple(labels or config.labels), "all")


def from_records(
    config: DataConfig,
    records: Iterable[Sequence[Any] | Mapping[str, Any]],
    tokenizers: Sequence[Tokenizer],
    labels: Sequence[str] = (),
) -> Dataset:
    """A data set of any Python iterable: for each record a tuple in the order of the task's columns, or a mapping.

    The records are taken as they come: pairs in one order, whatever `swap_pairs` says.
    """
    task = TASKS[config.task](config, tokenizers, labels or config.labels)
    given = _given(records, task.reads(config))
    cleaner = Cleaner(config, task.reads(config))
    return Dataset(task, [build_temporary(task.kinds, lambda writer: _fill(writer, task, given, cleaner))])


def _given(records: Iterable[Sequence[Any] | Mapping[str, Any]], columns: tuple[str, ...]) -> Iterator[Record]:
    for number, each in enumerate(records, start=1):
        place = Place("the iterable", number, "record")
        if isinstance(each, Mapping) and set(columns) <= set(each):
            each = [each[name] for name in columns]
        if not isinstance(each, Sequence) or isinstance(each, str) or len(each) != len(columns):
            raise UserError(f"{place}: {each!r:.40} is no tuple of {len(columns)}; give ({', '.join(columns)})")
        yield Record(place, tuple(each))


def raw_records(corpus: Corpus, columns: tuple[str, ...], published: str = "") -> Iterator[Record]:
    """The records of a corpus as they stand, from its files or made by the package, without those it skips."""
    made = corpus.format in ("embedded", "symbols")
    found = synthetic.records(corpus, columns) if made else read(corpus, columns, published)
    return without(found, corpus) if corpus.skip else found


def without(records: Iterator[Record], corpus: Corpus) -> Iterator[Record]:
    """All records but those that the corpus skips; a range that goes beyond the last one is a mistake."""
    ranges, number = sorted(corpus.skip, reverse=True), 0  # the next one stands last
    for number, record in enumerate(records, start=1):
        while ranges and ranges[-1][1] < number:
            ranges.pop()
        if not ranges or number < ranges[-1][0]:
            yield record
    first, last = max(corpus.skip, key=lambda each: each[1])
    if last > number:
        named = ", ".join(corpus.files) or f"the {corpus.format} corpus"
        raise UserError(f"data: skip: from {first:,} to {last:,}, but {named} has {number:,} records; lower it")


class _Maker:
    """What the steps of preparing share."""

    def __init__(self, config: DataConfig, say: Say):
        self.config, self.say = config, say
        self.folder = cache_folder(config.cache_dir)

    def records(self, corpus: Corpus) -> Iterator[Record]:
        """The records of a corpus as the task reads them."""
        task = TASKS[self.config.task]
        found = raw_records(corpus, task.reads(self.config), self.config.source_url)
        return documents(found, self.config.documents) if task.stream and corpus.format == "text" else found

    def identity(self, corpus: Corpus) -> list[Any]:
        """What decides the records of a corpus: its settings and the content of its files."""
        files = [content(path, self.folder) for path in paths(corpus, self.config.source_url)]
        made = synthetic.grammar_version() if corpus.format == "embedded" else ""
        return [corpus.model_dump(mode="json", exclude={"files", "weight"}), files, made]

    def dataset(
        self,
        corpora: Sequence[Corpus],
        tokenizers: Sequence[Tokenizer],
        labels: tuple[str, ...],
        part: Part,
        both: bool = False,
    ) -> Dataset:
        task = TASKS[self.config.task](self.config, tokenizers, labels)
        if task.stream and part != "all":
            # The end of a text is held out, not random pieces of it, which the rest would give away.
            task.share = (0.0, 1 - self.config.held_out) if part == "kept" else (1 - self.config.held_out, 1.0)
        stores = [self.store(corpus, task, "all" if task.stream else part, both) for corpus in corpora]
        found = Dataset(task, stores, [corpus.weight for corpus in corpora])
        if not found.size(0):
            dropped = Counter[str]()
            for store in stores:
                dropped.update(store.facts["dropped"])
            why = ", ".join(f"{times:,} {reason}" for reason, times in dropped.items())
            why = why or ("all, by skip" if any(corpus.skip for corpus in corpora) else "there were none")
            which = "held_out is too small for it" if part == "held out" else f"left out: {why}"
            raise UserError(f"data: no samples in {', '.join(corpora[0].files) or corpora[0].format} ({which})")
        if part != "held out" and isinstance(task, MaskedLanguageModel) and not any(map(task.enough, stores)):
            raise UserError("data.next_sentence: needs two documents or more; set data.documents to heading")
        return found

    def store(self, corpus: Corpus, task: Task, part: Part, both: bool) -> Store:
        settings = self.config.model_dump(mode="json", exclude=BATCHING)
        split = [part, self.config.held_out if part != "all" else 0, both]
        name = key(
            settings, task.labels, split, self.identity(corpus), [each.engine.to_str() for each in task.tokenizers]
        )
        folder = self.folder / "tokens" / name
        if (folder / "store.json").exists():
            return Store(folder)
        self.say(f"tokenizing {', '.join(corpus.files) or corpus.format} …")
        cleaner = Cleaner(self.config, task.reads(self.config), part, both)
        store = build(folder, task.kinds, lambda writer: _fill(writer, task, self.records(corpus), cleaner))
        dropped = ", ".join(f"{times:,} {reason}" for reason, times in store.facts["dropped"].items())
        self.say(f"{len(store):,} rows" + (f"; left out: {dropped}" if dropped else ""))
        return store

    def tokenizers(self, settings: TokenizerConfig) -> tuple[Tokenizer, ...]:
        """Those that are named, or new ones from the training data, kept in the cache."""
        if settings.path:
            return load_folder(find(settings.path))
        task = TASKS[self.config.task]
        columns = task.reads(self.config)
        two = self.config.task == "translation" and not settings.joint
        made = []
        for side in (0, 1) if two else (None,):
            size = settings.target_vocab_size or settings.vocab_size if side == 1 else settings.vocab_size
            cleaning = [self.config.normalize, self.config.lowercase, self.config.deduplicate, self.config.held_out]
            identities = [self.identity(corpus) for corpus in self.config.train]
            reading = [columns, self.config.documents if task.stream else ""]
            trained = settings.model_dump(mode="json", exclude={"path"})
            name = key("tokenizer", trained, side, size, task.roles, cleaning, reading, identities)
            file = self.folder / "tokenizers" / f"{name}.json"
            if not file.exists():
                with full_disk(file), locked(file.with_suffix(".lock")):
                    if not file.exists():
                        self.say(f"training a {settings.kind} tokenizer of {size:,} …")
                        texts = self._texts(side)
                        named = ", ".join(name for corpus in self.config.train for name in corpus.files) or "data.train"
                        lower, where = settings.lowercase, f"{named}: "
                        train(texts, settings.kind, size, task.roles, lower, exact=True, where=where).save(file)
            made.append(Tokenizer.load(file))
        return tuple(made)

    def _texts(self, side: int | None) -> Iterator[str]:
        """The texts of the training data, of one side or of all."""
        task = TASKS[self.config.task]
        columns = task.reads(self.config)
        wanted = [n for n, name in enumerate(columns) if name in TEXTS and side in (None, n)]
        part: Part = "kept" if self.config.held_out and not self.config.valid and not task.stream else "all"
        for corpus in self.config.train:
            cleaner = Cleaner(self.config, columns, part)
            for chunk in chunks(self.records(corpus)):
                for record in cleaner.chunk(chunk):
                    for value in (record.values[n] for n in wanted):
                        yield " ".join(value) if isinstance(value, list) else value

    def labels(self) -> tuple[str, ...]:
        """The labels that occur in the training data, in sorted order."""
        if self.config.task not in ("classification", "tagging"):
            return ()
        reading = [self.config.task, self.config.text_pairs, [self.identity(corpus) for corpus in self.config.train]]
        file = self.folder / "labels" / f"{key('labels', reading)}.json"
        if file.exists():
            return tuple(json.loads(read_text(file)))
        found: set[str] = set()
        for record in chain.from_iterable(self.records(corpus) for corpus in self.config.train):
            value = record.values[-1]
            if value == "" or (isinstance(value, list) and "" in value):
                raise UserError(f"{record.place}: the label is missing")
            found.update(map(str, value if isinstance(value, list) else [value]))
            if len(found) > LABELS:
                raise UserError(f"{record.place}: more than {LABELS:,} different labels; set columns.label")
        if len(found) == 1 and self.config.task == "classification":
            raise UserError(f"data.train: {found.pop()!r:.40} is the only label; there is nothing to tell apart")
        names = sorted(found, key=lambda name: (name != "O", name))
        with full_disk(file):
            write_text(file, json.dumps(names))
        return tuple(names)


def _fill(writer: Writer, task: Task, records: Iterator[Record], cleaner: Cleaner) -> Mapping[str, Any]:
    """Every record into the store; returns what is worth knowing about it."""
    for chunk in chunks(records):
        writer.add(task.rows(cleaner.chunk(chunk), cleaner.dropped))
    return {"dropped": dict(cleaner.dropped)}
