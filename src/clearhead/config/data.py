"""What can be set about data and tokenizers: where it lies, what it is for, how it is cleaned and batched."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clearhead.config.settings import Settings, several

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
RANGES = 1000  # that one corpus may leave out


def _corpora(value: Any) -> Any:
    if not isinstance(value, dict | list | tuple | Corpus):
        raise ValueError(f"{value!r:.60} is no corpus; write its parts, like `files: …`, or a list of such corpora")
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _ranges(value: Any) -> Any:
    listed = isinstance(value, list | tuple)
    if not listed or not all(isinstance(each, list | tuple) and len(each) == 2 for each in value):
        raise ValueError(
            f"{value!r:.60} is no list of ranges; write the first and the last record of each, like [[2451, 3450]]"
        )
    if len(value) > RANGES:
        raise ValueError(f"{len(value):,} ranges; give at most {RANGES:,}")
    return tuple(tuple(each) for each in value)


Names = Annotated[tuple[str, ...], BeforeValidator(several)]
Ranges = Annotated[tuple[tuple[Count, Count], ...], BeforeValidator(_ranges)]


def _texts(value: Any) -> Any:
    """Keys and values as texts: YAML takes 1 for a number."""
    if not isinstance(value, Mapping):
        return value
    return {str(key): str(each) if isinstance(each, int) else each for key, each in value.items()}


Texts = Annotated[dict[str, str], BeforeValidator(_texts)]


class Corpus(Settings):
    """One set of files, or one that the package makes itself (embedded: its grammar; symbols: copy and reverse)."""

    format: Format = "text"
    files: Names = ()  # plain or gzip; parallel: source and target, in turn
    # What is where: {source: 1, target: 2} (-1: the last), or the names in the header
    columns: dict[str, int | str] = Field(default_factory=dict)
    header: bool = False  # the first line of tsv and csv names the columns; a column given by name implies it
    rename: Texts = Field(default_factory=dict)  # labels with another name in these files: {1: World, 2: Sports}
    # Records that are left out, the first and the last of each range, counted from 1 over all files: [[2451, 3450]]
    skip: Ranges = ()
    weight: float = Field(default=1.0, gt=0, le=1000)  # 2: every sample twice an epoch; 0.5: another half each epoch
    # What the package makes itself
    languages: Annotated[tuple[Language, ...], BeforeValidator(several)] = ("en", "de")  # source, target
    level: Literal[1, 2, 3] = 3
    split: Literal["train", "valid", "test"] = "train"
    count: Count = 100_000
    sentences: int = Field(default=1, ge=1, le=100)  # of a text to write on, or to ask about: one to so many
    seed: int = Field(default=0, ge=0, le=1 << 62)
    order: Literal["copy", "reverse"] = "copy"
    symbols: int = Field(default=26, ge=2, le=10_000)
    min_length: int = Field(default=3, ge=1, le=10_000)
    max_length: int = Field(default=16, ge=1, le=10_000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = self.format in ("embedded", "symbols")
        if not own and not self.files:
            raise ValueError(f"files: missing; name the files of this {self.format} corpus")
        if own and self.files:
            raise ValueError(f"files: {self.format} is made by the package and reads no files; leave it out")
        if self.format == "parallel" and len(self.files) % 2:
            raise ValueError(f"files: {len(self.files)} given; parallel needs a source and a target, in turn")
        if 0 in self.columns.values():
            raise ValueError("columns: there is no column 0; the first is 1, the last is -1")
        if len(self.languages) > 2 or not self.languages:
            raise ValueError("languages: name one, or a source and a target, like [en, de]")
        for first, last in self.skip:
            if first > last:
                raise ValueError(f"skip: the range from {first:,} to {last:,} ends before it begins; turn it round")
        if self.min_length > self.max_length:
            raise ValueError(f"shortest ({self.min_length}) is more than longest ({self.max_length})")
        return self


Corpora = Annotated[tuple[Corpus, ...], BeforeValidator(_corpora)]


class DataConfig(Settings):
    """Everything between raw files and batches."""

    task: Task
    train: Corpora = ()
    valid: Corpora = ()
    test: Corpora = ()
    held_out: float = Field(default=0.0, ge=0, le=0.5)  # share of `train` kept for validation, chosen by source side
    source_url: str = ""  # where the files can be found, for whoever does not have them yet

    # Cleaning
    normalize: Literal["none", "nfc", "nfkc"] = "none"
    lowercase: bool = False
    deduplicate: bool = False
    min_length: int = Field(default=1, ge=0, le=1 << 24)  # tokens; shorter ones are left out
    # Tokens; longer ones are left out, or cut where that is usual. Five hold two texts of a token and BERT's marks.
    max_length: int = Field(default=512, ge=5, le=1 << 24)
    max_length_ratio: float | None = Field(
        default=None, ge=1, le=1000
    )  # of the longer to the shorter side of a translation

    # What the task needs
    documents: Literal["line", "paragraph", "heading", "file"] = "file"  # what of a plain text is one document
    isolate_documents: bool = False  # language model: no document sees another
    labels: Names = ()  # allowed labels, in order; empty: those of the training data
    text_pairs: bool = False  # classification and regression of two texts
    swap_pairs: bool = False  # and every pair to learn from a second time, its texts exchanged; not for validation
    next_sentence: bool = False  # masked language model: with BERT's second task
    mask_prob: float = Field(default=0.15, gt=0, le=0.9)
    whole_word_masking: bool = False
    stride: int = Field(default=128, ge=1, le=1 << 24)  # answering: tokens that neighboring windows share
    max_score: float = Field(default=1.0, gt=0, le=1e6)  # similarity: the score of two texts that say the same
    contrastive: bool = False  # similarity: pairs have no score; each belongs together, and to no other of its batch
    pooling: Literal["mean", "cls"] = "mean"  # similarity: of all tokens, or the one that sums the text up

    # Batches
    batch_tokens: int = Field(
        default=4096, ge=1, le=1 << 30
    )  # padded tokens of the global batch, source and target together
    packed: bool = False  # samples of a batch one after the other in one row, without padding
    bucket_size: int = Field(default=1 << 15, ge=1, le=1 << 22)  # samples that are sorted by length together
    workers: int = Field(default=2, ge=0, le=256)
    cache_dir: str = ""  # folder for tokenized data; empty: CLEARHEAD_CACHE, or a folder of the user's

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.held_out and self.valid:
            raise ValueError("held_out: valid names its own data; leave one of them out")
        if self.task == "answering" and (self.lowercase or self.normalize != "none"):
            raise ValueError("lowercase, normalize: answers are found by their place; let the tokenizer do it")
        if self.swap_pairs and self.task not in ("classification", "regression"):
            raise ValueError(f"swap_pairs: for classification and regression of two texts; the task is {self.task}")
        if self.swap_pairs and not self.text_pairs:
            raise ValueError("swap_pairs: there is only one text to a record; set second to true, or leave it out")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("labels: one is named twice; name each once")
        return self


class TokenizerConfig(Settings):
    """Where the tokenizer comes from: trained on the training data, or an existing one."""

    path: str = ""  # a folder with tokenizer.json, GPT-2's or BERT's files; empty: train one
    kind: Kind = "byte-bpe"
    vocab_size: int = Field(default=8000, ge=1, le=1 << 24)
    lowercase: bool = False
    joint: bool = True  # translation: one for both languages
    target_vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)  # of the target's own, where it differs

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.joint and self.target_vocab_size is not None:
            raise ValueError("target_size: joint is true, so there is one tokenizer; set joint to false")
        return self
