"""Data and tokenizer settings: files and formats, task, cleaning, batching."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clearhead.config.settings import Settings, as_tuple

Format = Literal["text", "parallel", "tsv", "csv", "jsonl", "conll", "squad", "trec", "embedded", "symbols"]
Task = Literal[
    "translation",
    "language-model",
    "masked-language-model",
    "classification",
    "regression",
    "tagging",
    "answering",
    "similarity",
]
Language = Literal["en", "de", "zh"]
Kind = Literal["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"]
Count = Annotated[int, Field(ge=1, le=1 << 40)]
DEFAULT_VOCAB_SIZE = 8000
MAX_SKIP_RANGES = 1000  # per corpus
MIN_LENGTH = 5  # smallest data.max_length: special tokens, and room for a token of each text
# Format of a file by the end of its name, before `.gz`; other files are plain text
FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".tsv": "tsv",
    ".tab": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "squad",
    ".conll": "conll",
    ".bio": "conll",
    ".iob": "conll",
}
TEXT_SUFFIXES = (".txt", ".text", ".md", ".log")
LANGUAGE_SUFFIX = re.compile(r"\.[a-z]{2,3}")  # of parallel files: train.en, train.de


def data_suffix(name: str) -> str:
    """Return the last suffix of a file name in lowercase, without `.gz`: data.TSV.gz → .tsv."""
    return PurePath(name.lower().removesuffix(".gz")).suffix


def is_data_file(name: str) -> bool:
    """Return whether a file of this name is data, not settings; JSON can be both."""
    suffix = data_suffix(name)
    return name.lower().endswith(".gz") or (suffix in (*FORMAT_OF_SUFFIX, *TEXT_SUFFIXES) and suffix != ".json")


def infer_format(files: Sequence[str]) -> Format:
    """Return the format of files by their names; raise if the names are of different formats."""
    suffixes = list(dict.fromkeys(data_suffix(name) for name in files))
    formats = {FORMAT_OF_SUFFIX.get(suffix, "text") for suffix in suffixes}
    if len(formats) > 1:
        names = " and ".join(suffix or "names without an extension" for suffix in suffixes)
        raise ValueError(f"files: {names} are mixed; set format, or make each a corpus of its own")
    sides = [data_suffix(name) for name in files]
    pairs = list(zip(sides[::2], sides[1::2], strict=False))
    if formats == {"text"} and len(files) % 2 == 0 and all(_is_language_pair(*pair) for pair in pairs):
        return "parallel"
    return formats.pop()


def _is_language_pair(source: str, target: str) -> bool:
    suffixes = (source, target)
    is_language = all(LANGUAGE_SUFFIX.fullmatch(each) and each not in TEXT_SUFFIXES for each in suffixes)
    return is_language and source != target


def _corpora(value: Any) -> Any:
    if not isinstance(value, dict | list | tuple | Corpus):
        raise ValueError(f"{value!r:.60} is not a corpus; write its settings, like `files: …`, or a list of corpora")
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _ranges(value: Any) -> Any:
    listed = isinstance(value, list | tuple)
    if not listed or not all(isinstance(each, list | tuple) and len(each) == 2 for each in value):
        raise ValueError(
            f"{value!r:.60} is not a list of ranges; write first and last record of each, like [[2451, 3450]]"
        )
    if len(value) > MAX_SKIP_RANGES:
        raise ValueError(f"{len(value):,} ranges are too many; give at most {MAX_SKIP_RANGES:,}")
    return tuple(tuple(each) for each in value)


NameList = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Ranges = Annotated[tuple[tuple[Count, Count], ...], BeforeValidator(_ranges)]


def _string_map(value: Any) -> Any:
    """Convert integer keys and values to strings: YAML reads 1 as a number."""
    if not isinstance(value, Mapping):
        return value
    return {str(key): str(each) if isinstance(each, int) else each for key, each in value.items()}


StringMap = Annotated[dict[str, str], BeforeValidator(_string_map)]


class Corpus(Settings):
    """One set of files, or synthetic data (`embedded`: the built-in grammar; `symbols`: copy or reverse a sequence)."""

    format: Format = "text"  # default: by the files' names, like .csv or .tsv.gz
    # Files (plain or gzip), folders, or patterns like novels/*.txt; parallel: source, target, source, target …
    files: NameList = ()
    # Column of each field: {source: 1, target: 2} (-1: the last), or names in the header
    columns: dict[str, int | str] = Field(default_factory=dict)
    header: bool = False  # tsv, csv: the first line has column names; implied by a column given by name
    rename: StringMap = Field(default_factory=dict)  # map labels of these files to others: {1: World, 2: Sports}
    skip: Ranges = ()  # ranges of records to leave out, first and last, counted from 1 over all files: [[2451, 3450]]
    weight: float = Field(default=1.0, gt=0, le=1000)  # 2: every sample twice an epoch; 0.5: half of them, alternating
    # Synthetic data
    languages: Annotated[tuple[Language, ...], BeforeValidator(as_tuple)] = ("en", "de")  # embedded: source, target
    level: Literal[1, 2, 3] = 3  # embedded: 1: simple clauses of about 120 words; 3: the whole grammar
    split: Literal["train", "valid", "test"] = "train"  # no record is in two splits
    count: Count = 100_000  # records
    sentences: int = Field(default=1, ge=1, le=100)  # embedded: a text has 1 to this many sentences
    seed: int = Field(default=0, ge=0, le=1 << 62)
    order: Literal["copy", "reverse"] = "copy"  # symbols: the target
    symbols: int = Field(default=26, ge=2, le=10_000)  # symbols: size of the alphabet
    min_length: int = Field(default=3, ge=1, le=10_000)  # symbols: length of a sequence
    max_length: int = Field(default=16, ge=1, le=10_000)

    @model_validator(mode="before")
    @classmethod
    def _infer_format(cls, data: Any) -> Any:
        """Set the format by the names of the files."""
        if not isinstance(data, Mapping) or "format" in data:
            return data
        files = data.get("files")
        names = [files] if isinstance(files, str) else files
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            return data
        return {"format": infer_format(names), **data}

    @model_validator(mode="after")
    def _check(self) -> Self:
        synthetic = self.format in ("embedded", "symbols")
        if not synthetic and not self.files:
            raise ValueError(f"files: missing; name the files of this {self.format} corpus")
        if synthetic and self.files:
            raise ValueError(f"files: {self.format} is synthetic and reads no files; remove files")
        if self.format == "parallel" and len(self.files) % 2:
            raise ValueError(f"files: {len(self.files)} given; parallel needs pairs of a source and a target")
        if 0 in self.columns.values():
            raise ValueError("columns: there is no column 0; the first is 1, the last is -1")
        if len(self.languages) > 2 or not self.languages:
            raise ValueError("languages: name one, or a source and a target, like [en, de]")
        for first, last in self.skip:
            if first > last:
                raise ValueError(
                    f"skip: the range from {first:,} to {last:,} ends before it starts; swap the two numbers"
                )
        if self.min_length > self.max_length:
            raise ValueError(f"min_length: {self.min_length} is more than max_length {self.max_length}; lower it")
        return self


Corpora = Annotated[tuple[Corpus, ...], BeforeValidator(_corpora)]


class DataConfig(Settings):
    """Everything from raw files to batches."""

    task: Task
    train: Corpora = ()
    valid: Corpora = ()
    test: Corpora = ()
    # Fraction of `train` split off for validation, by first text; translation: of these pairs, validation uses those
    # without a near-duplicate in training
    held_out: float = Field(default=0.0, ge=0, le=0.5)
    source_url: str = ""  # where to download the files; shown if one is missing

    # Cleaning
    normalize: Literal["none", "nfc", "nfkc"] = "none"
    lowercase: bool = False
    deduplicate: bool = False
    min_length: int = Field(default=1, ge=0, le=1 << 24)  # tokens; shorter samples are dropped
    # Tokens with special tokens; longer translation pairs are dropped, documents are split, other texts are truncated.
    # In a recipe, the default is no more than the model's positions.
    max_length: int = Field(default=512, ge=MIN_LENGTH, le=1 << 24)
    max_length_ratio: float | None = Field(default=None, ge=1, le=1000)  # translation: longer side to shorter side

    # Task
    target_language: str = ""  # translation: a code like zh, for the tokenizer of BLEU; empty: guessed from the script
    documents: Literal["line", "paragraph", "heading", "file"] = "file"  # how plain text is split into documents
    isolate_documents: bool = False  # language model: no attention across documents
    labels: NameList = ()  # in the order of their ids; empty: sorted labels of the training data
    text_pairs: bool = False  # classification, regression: two texts per record
    swap_pairs: bool = False  # train on every pair in both orders; validation keeps one
    next_sentence: bool = False  # masked language model: add BERT's next-sentence prediction
    mask_prob: float = Field(default=0.15, gt=0, le=0.9)  # masked language model: fraction of tokens to predict
    whole_word_masking: bool = False  # mask all tokens of a word together
    stride: int = Field(default=128, ge=1, le=1 << 24)  # answering: tokens shared by adjacent windows of a long context
    max_score: float = Field(default=1.0, gt=0, le=1e6)  # similarity: score of a pair with the same meaning
    contrastive: bool = False  # similarity: no scores; in-batch negatives
    pooling: Literal["mean", "cls"] = "mean"  # similarity: mean of all tokens, or the first (encoder) or last

    # Batches
    batch_tokens: int = Field(default=4096, ge=1, le=1 << 30)  # global batch: tokens, source + target, with padding
    packed: bool = False  # concatenate the samples of a batch in one row instead of padding them
    bucket_size: int = Field(default=1 << 15, ge=1, le=1 << 22)  # samples to sort by length at a time
    workers: int = Field(default=2, ge=0, le=256)  # threads that prepare batches; 0: none
    cache_dir: str = ""  # folder for tokenized data; empty: CLEARHEAD_CACHE, or clearhead in the user's cache folder

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not re.fullmatch("([a-z]{2,3})?", self.target_language):
            raise ValueError(f"target_language: {self.target_language!r:.40} is not a language code; write it like zh")
        if self.held_out and self.valid:
            raise ValueError("held_out: valid is set too; remove one of them")
        if self.task == "answering" and (self.lowercase or self.normalize != "none"):
            raise ValueError(
                "lowercase, normalize: they would shift the answers' character offsets; let the tokenizer do it"
            )
        if self.swap_pairs and self.task not in ("classification", "regression"):
            raise ValueError(
                f"swap_pairs: for classification and regression of text pairs; the task is {self.task}, so remove it"
            )
        if self.swap_pairs and not self.text_pairs:
            raise ValueError("swap_pairs: records have only one text; set text_pairs to true, or remove swap_pairs")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("labels: duplicate label; name each once")
        return self


class TokenizerConfig(Settings):
    """An existing tokenizer, or one trained on the training data."""

    path: str = ""  # folder with tokenizer.json, or GPT-2's or BERT's files; empty: train a new one
    kind: Kind = "byte-bpe"
    vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)  # default: 8000, or fewer if the text has fewer
    lowercase: bool = False
    joint: bool = True  # translation: one tokenizer for both languages
    target_vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)  # joint: false; default: vocab_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.joint and self.target_vocab_size is not None:
            raise ValueError("target_vocab_size: joint is true, so there is one tokenizer; set joint to false")
        return self
