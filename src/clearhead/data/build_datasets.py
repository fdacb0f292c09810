"""Build datasets from settings: read the files, train the tokenizer if needed, fill or reuse the token cache."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from clearhead.config.data import DEFAULT_VOCAB_SIZE, Corpus, DataConfig, TokenizerConfig
from clearhead.data import synthetic
from clearhead.data.cleaning import Cleaner, Split, chunks
from clearhead.data.corpus_files import corpus_files, files_of_corpus, find_file
from clearhead.data.dataset import Dataset
from clearhead.data.formats import TEXT_COLUMNS, Location, Record, read_corpus
from clearhead.data.held_out import held_out_pairs
from clearhead.data.labeled_tasks import Answering, Classification, Regression, Similarity, Tagging
from clearhead.data.masked_lm import MaskedLanguageModel
from clearhead.data.tasks import LanguageModel, Task, Translation, split_documents, split_long_texts
from clearhead.data.token_store import (
    Dropped,
    StoreWriter,
    TokenStore,
    build_store,
    build_temporary_store,
    cache_folder,
    cache_key,
    cache_write_errors,
    file_digest,
    read_cached,
    write_cached,
)
from clearhead.errors import UserError
from clearhead.files import file_lock
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
# Settings that do not change the content of a store, or are in its key in another form
NOT_IN_CACHE_KEY = {
    *("train", "valid", "test", "held_out", "swap_pairs", "source_url", "isolate_documents", "mask_prob"),
    *("whole_word_masking", "batch_tokens", "packed", "bucket_size", "workers", "cache_dir", "pooling"),
    "target_language",
}

MAX_LABELS = 10_000  # more mean that the label column is a text

Log = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """Datasets for training and validation, with their tokenizers and labels."""

    train: Dataset
    valid: Dataset | None
    task: Task
    tokenizers: tuple[Tokenizer, ...]  # one, or source and target
    labels: tuple[str, ...]


def prepare(
    config: DataConfig,
    tokenizer: TokenizerConfig | Sequence[Tokenizer],
    labels: Sequence[str] = (),
    log: Log = lambda line: None,
) -> Data:
    """Build the datasets of a run; slow steps are logged, one line each.

    `tokenizer` is a config, or the tokenizers of an existing model, whose labels are then given as `labels`.
    """
    if not config.train:
        raise UserError("data.train: missing; name the training files")
    builder = _Builder(config, log)
    builder.check_files((*config.train, *config.valid))
    tokenizers = builder.tokenizers(tokenizer) if isinstance(tokenizer, TokenizerConfig) else tuple(tokenizer)
    names = tuple(labels or config.labels or builder.labels())
    split: Split = "kept" if config.held_out and not config.valid else "all"
    train_set = builder.dataset(config.train, tokenizers, names, split, config.swap_pairs)
    if config.valid:
        valid_set: Dataset | None = builder.dataset(config.valid, tokenizers, names, "all")
    else:
        valid_set = builder.dataset(config.train, tokenizers, names, "held out") if config.held_out else None
    return Data(train_set, valid_set, train_set.task, tokenizers, names)


def open_dataset(
    config: DataConfig,
    corpora: Sequence[Corpus],
    tokenizers: Sequence[Tokenizer],
    labels: Sequence[str] = (),
    log: Log = lambda line: None,
) -> Dataset:
    """Build a dataset of other corpora, such as a test set, for a model with tokenizers."""
    builder = _Builder(config, log)
    builder.check_files(corpora)
    return builder.dataset(corpora, tokenizers, tuple(labels or config.labels), "all")


def from_records(
    config: DataConfig,
    records: Iterable[Sequence[Any] | Mapping[str, Any]],
    tokenizers: Sequence[Tokenizer],
    labels: Sequence[str] = (),
) -> Dataset:
    """Build a dataset from a Python iterable of tuples in the order of the task's columns, or mappings.

    `swap_pairs` and `held_out` are not applied.
    """
    task = TASKS[config.task](config, tokenizers, labels or config.labels)
    located = _as_records(records, task.record_columns(config))
    cleaner = Cleaner(config, task.record_columns(config))
    return Dataset(task, [build_temporary_store(task.fields, lambda writer: _fill(writer, task, located, cleaner))])


def _as_records(records: Iterable[Sequence[Any] | Mapping[str, Any]], columns: tuple[str, ...]) -> Iterator[Record]:
    for number, record in enumerate(records, start=1):
        location = Location("the iterable", number, "record")
        if isinstance(record, Mapping) and set(columns) <= set(record):
            record = [record[name] for name in columns]
        if not isinstance(record, Sequence) or isinstance(record, str) or len(record) != len(columns):
            raise UserError(f"{location}: {record!r:.40} is not a tuple of {len(columns)}; give ({', '.join(columns)})")
        yield Record(location, tuple(record))


def raw_records(corpus: Corpus, columns: tuple[str, ...], source_url: str = "") -> Iterator[Record]:
    """Yield the uncleaned records of a corpus, files or synthetic, without the skipped ones."""
    is_synthetic = corpus.format in ("embedded", "symbols")
    records = synthetic.records(corpus, columns) if is_synthetic else read_corpus(corpus, columns, source_url)
    return skip_records(records, corpus) if corpus.skip else records


def skip_records(records: Iterator[Record], corpus: Corpus) -> Iterator[Record]:
    """Drop the records in `corpus.skip`; raise if a range exceeds the number of records."""
    ranges, number = sorted(corpus.skip, reverse=True), 0  # next range last
    for number, record in enumerate(records, start=1):
        while ranges and ranges[-1][1] < number:
            ranges.pop()
        if not ranges or number < ranges[-1][0]:
            yield record
    first, last = max(corpus.skip, key=lambda each: each[1])
    if last > number:
        name = ", ".join(corpus.files) or f"the {corpus.format} corpus"
        raise UserError(f"data: skip: from {first:,} to {last:,}, but {name} has {number:,} records; lower it")


class _Builder:
    """Settings and cache folder shared by all steps."""

    def __init__(self, config: DataConfig, log: Log):
        self.config, self.log = config, log
        self.folder = cache_folder(config.cache_dir)

    def check_files(self, corpora: Iterable[Corpus]) -> None:
        """Raise before any work if a file is missing; log how many files in folders are left out."""
        for corpus in corpora:
            files, left_out = files_of_corpus(corpus, self.config.source_url)
            if left_out:
                names = ", ".join(path.name for path in left_out[:3]) + (", …" if len(left_out) > 3 else "")
                self.log(
                    f"{', '.join(corpus.files)}: {len(files):,} {corpus.format} files; left out: {len(left_out):,} "
                    f"others ({names})"
                )

    def records(self, corpus: Corpus) -> Iterator[Record]:
        """Yield the records of a corpus; plain text is split into documents, and long ones into several records."""
        task = TASKS[self.config.task]
        records = raw_records(corpus, task.record_columns(self.config), self.config.source_url)
        if not task.is_stream:
            return records
        is_plain_text = corpus.format == "text"
        return split_documents(records, self.config.documents) if is_plain_text else split_long_texts(records)

    @cached_property
    def held_out_pairs(self) -> list[list[Record]]:
        """Return the held-out pairs of each training corpus of a translation task."""
        self.log("comparing the held-out pairs with the training data …")
        return held_out_pairs(self.config, self.records, self.log)

    def identity(self, corpus: Corpus) -> list[Any]:
        """Return what determines the records of a corpus: its settings and the digests of its files."""
        files = [file_digest(path, self.folder) for path in corpus_files(corpus, self.config.source_url)]
        grammar = synthetic.grammar_version() if corpus.format == "embedded" else ""
        return [corpus.model_dump(mode="json", exclude={"files", "weight"}), files, grammar]

    def dataset(
        self,
        corpora: Sequence[Corpus],
        tokenizers: Sequence[Tokenizer],
        labels: tuple[str, ...],
        split: Split,
        swap_pairs: bool = False,
    ) -> Dataset:
        task = TASKS[self.config.task](self.config, tokenizers, labels)
        if task.is_stream and split != "all":
            # Hold out the end of the stream: random windows would overlap in content with the training data.
            boundary = 1 - self.config.held_out
            task.stream_range = (0.0, boundary) if split == "kept" else (boundary, 1.0)
        stores = [self.store(corpus, task, "all" if task.is_stream else split, swap_pairs) for corpus in corpora]
        dataset = Dataset(task, stores, [corpus.weight for corpus in corpora])
        if not dataset.num_samples(0):
            dropped = Counter[str]()
            for store in stores:
                dropped.update(store.dropped)
            counts = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
            counts = counts or ("all, by skip" if any(corpus.skip for corpus in corpora) else "no records")
            why = "held_out is too small for it" if split == "held out" else f"left out: {counts}"
            name = ", ".join(corpora[0].files) or corpora[0].format
            raise UserError(f"data: no samples in {name} ({why}); check the data settings")
        if split == "held out" or not isinstance(task, MaskedLanguageModel):
            return dataset
        if not any(map(task.has_enough_documents, stores)):
            raise UserError("data.next_sentence: needs two documents or more; set data.documents to heading")
        return dataset

    def store(self, corpus: Corpus, task: Task, split: Split, swap_pairs: bool) -> TokenStore:
        settings = self.config.model_dump(mode="json", exclude=NOT_IN_CACHE_KEY)
        split_key: list[Any] = [split, self.config.held_out if split != "all" else 0, swap_pairs]
        compared = split == "held out" and isinstance(task, Translation)
        if compared:
            split_key.append([self.identity(each) for each in self.config.train])
        name = cache_key(
            settings, task.labels, split_key, self.identity(corpus), [each.engine.to_str() for each in task.tokenizers]
        )
        folder = self.folder / "tokens" / name
        if (folder / "store.json").exists():
            return TokenStore(folder, task.fields)
        self.log(f"tokenizing {', '.join(corpus.files) or corpus.format} …")
        cleaner = Cleaner(self.config, task.record_columns(self.config), split, swap_pairs)
        pairs = iter(self.held_out_pairs[self.config.train.index(corpus)]) if compared else None
        records = pairs or self.records(corpus)
        store = build_store(folder, task.fields, lambda writer: _fill(writer, task, records, cleaner))
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in store.dropped.items())
        truncated = f"; truncated to {self.config.max_length:,} tokens: {store.truncated:,}" if store.truncated else ""
        self.log(f"{len(store):,} rows" + (f"; left out: {dropped}" if dropped else "") + truncated)
        return store

    def tokenizers(self, settings: TokenizerConfig) -> tuple[Tokenizer, ...]:
        """Load the named tokenizers, or train them on the training data and cache them."""
        if settings.path:
            return load_folder(find_file(settings.path))
        task = TASKS[self.config.task]
        columns = task.record_columns(self.config)
        separate = self.config.task == "translation" and not settings.joint
        tokenizers = []
        for side in (0, 1) if separate else (None,):
            given = settings.target_vocab_size or settings.vocab_size if side == 1 else settings.vocab_size
            size = given or DEFAULT_VOCAB_SIZE
            cleaning = [self.config.normalize, self.config.lowercase, self.config.deduplicate, self.config.held_out]
            identities = [self.identity(corpus) for corpus in self.config.train]
            columns_key = [columns, self.config.documents if task.is_stream else ""]
            options = settings.model_dump(mode="json", exclude={"path"})
            name = cache_key("tokenizer", options, side, size, task.roles, cleaning, columns_key, identities)
            file = self.folder / "tokenizers" / f"{name}.json"
            seal = file.with_suffix(".sha256")  # written last, so that it is there only if the file is complete
            if not seal.exists():
                with cache_write_errors(file), file_lock(file.with_suffix(".lock")):
                    if not seal.exists():
                        self.log(f"training a {settings.kind} tokenizer of {size:,} …")
                        texts = self._texts(side)
                        files = ", ".join(file for corpus in self.config.train for file in corpus.files)
                        lowercase, where = settings.lowercase, f"{files or 'data.train'}: "
                        exact = given is not None
                        train(texts, settings.kind, size, task.roles, lowercase, exact=exact, where=where).save(file)
                        write_cached(seal, file_digest(file, self.folder))
            if file_digest(file, self.folder) != read_cached(seal):
                raise UserError(f"{file} changed since it was written; delete it and {seal.name}")
            tokenizers.append(Tokenizer.load(file))
        return tuple(tokenizers)

    def _texts(self, side: int | None) -> Iterator[str]:
        """Yield the training texts of one side or all."""
        task = TASKS[self.config.task]
        columns = task.record_columns(self.config)
        text_columns = [n for n, name in enumerate(columns) if name in TEXT_COLUMNS and side in (None, n)]
        split: Split = "kept" if self.config.held_out and not self.config.valid and not task.is_stream else "all"
        for corpus in self.config.train:
            cleaner = Cleaner(self.config, columns, split)
            for chunk in chunks(self.records(corpus)):
                for record in cleaner.clean_chunk(chunk):
                    for value in (record.values[n] for n in text_columns):
                        yield " ".join(value) if isinstance(value, list) else value

    def labels(self) -> tuple[str, ...]:
        """Return the sorted labels of the training data; O comes first."""
        if self.config.task not in ("classification", "tagging"):
            return ()
        key = [self.config.task, self.config.text_pairs, [self.identity(corpus) for corpus in self.config.train]]
        file = self.folder / "labels" / f"{cache_key('labels', key)}.json"
        if file.exists():
            return tuple(json.loads(read_cached(file)))
        labels: set[str] = set()
        for record in chain.from_iterable(self.records(corpus) for corpus in self.config.train):
            value = record.values[-1]
            if value == "" or (isinstance(value, list) and "" in value):
                raise UserError(f"{record.location}: the label is missing; add it, or set columns.label")
            labels.update(map(str, value if isinstance(value, list) else [value]))
            if len(labels) > MAX_LABELS:
                raise UserError(f"{record.location}: more than {MAX_LABELS:,} different labels; set columns.label")
        if len(labels) == 1 and self.config.task == "classification":
            raise UserError(f"data.train: {labels.pop()!r:.40} is the only label; classification needs two or more")
        names = sorted(labels, key=lambda name: (name != "O", name))
        with cache_write_errors(file):
            write_cached(file, json.dumps(names))
        return tuple(names)


def _fill(writer: StoreWriter, task: Task, records: Iterator[Record], cleaner: Cleaner) -> Dropped:
    """Clean, tokenize and write all records; return how many were left out, by reason."""
    for chunk in chunks(records):
        writer.add(task.encode_records(cleaner.clean_chunk(chunk), cleaner.dropped))
    return cleaner.dropped
