"""Guess the task of data files: their format, the columns, and what a model can learn from them; with the reasons."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from clearhead.config.data import Corpus, data_suffix, infer_format
from clearhead.data.corpus_files import corpus_files
from clearhead.errors import UserError
from clearhead.files import read_lines

SAMPLE_LINES = 20_000  # of all files
MAX_LABELS = 100  # more values are not a label
MIN_REPEATS = 3  # records per label, at least
MIN_WORDS = 4  # of a sentence, on average: a column of fewer whose values repeat are labels
MIN_WIDE_CHARS = 6  # of a sentence in Chinese or Japanese
MIN_CHARS = 10  # of a text, on average; shorter columns are names, dates, …
TAG = re.compile(r"O|[BIESLU]-\S+|[A-Z]{1,5}\$?|[.,:;'`()#$-]{1,3}")  # BIO tags, or parts of speech
TAGGED_SHARE = 0.9
LABEL_NAMES = ("label", "labels", "class", "category", "sentiment", "intent", "topic", "target", "tag", "y")
SCORE_NAMES = ("score", "similarity", "sim", "rating", "relatedness")


@dataclass(frozen=True)
class Guess:
    """The task, the corpus and why; what a recipe needs to know of the data."""

    task: str
    corpus: dict[str, Any]  # format, files, columns
    reasons: list[str]  # one line each
    records: int  # estimated from the sample
    tokens: int  # estimated: a quarter of the characters, or their number in Chinese and Japanese
    words: int  # distinct words in the sample
    longest: int  # characters of the longest text in the sample
    text_pairs: bool = False
    max_score: float = 1.0


@dataclass
class _Sample:
    """The first records of some files."""

    rows: list[list[Any]]
    names: list[str]  # of the columns; empty: no header
    bytes_read: int = 0
    complete: bool = True  # all records were read


@dataclass
class _Column:
    """What the values of a column are."""

    key: int | str  # number from 1, or name
    values: list[str]
    numbers: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for value in self.values:
            try:
                self.numbers.append(float(value))
            except ValueError:
                return

    @property
    def name(self) -> str:
        """The name in lowercase; empty without a header."""
        return self.key.lower() if isinstance(self.key, str) else ""

    @property
    def title(self) -> str:
        """The name in quotes, or the number."""
        return repr(self.key) if isinstance(self.key, str) else f"column {self.key}"

    @property
    def is_number(self) -> bool:
        return len(self.numbers) == len(self.values)

    @property
    def is_label(self) -> bool:
        counts = Counter(self.values)
        repeats = len(self.values) >= MIN_REPEATS * len(counts)
        return 2 <= len(counts) <= MAX_LABELS and repeats and "" not in counts and max(map(len, counts)) <= 60

    @property
    def is_text(self) -> bool:
        chars = sum(map(len, self.values)) / len(self.values)
        return not self.is_number and (chars >= MIN_CHARS or any(map(is_wide, self.values[:100])))

    @property
    def is_sentences(self) -> bool:
        """Whether the values are sentences, even if they repeat like labels."""
        distinct = set(self.values)
        wide = all(map(is_wide, distinct))
        size = sum(len(value) if wide else len(value.split()) for value in distinct) / len(distinct)
        return self.is_text and size >= (MIN_WIDE_CHARS if wide else MIN_WORDS)


def guess(names: Sequence[str]) -> Guess:
    """Guess the task of files, patterns or folders."""
    corpus = Corpus.build({"files": list(names)}, where=", ".join(names))
    paths = corpus_files(corpus)
    format, why = _format(list(names), paths)
    settings: dict[str, Any] = {"format": format, "files": list(names)}
    reasons = [f"format   {format}: {why}"]
    if format == "squad":
        return _finish("answering", settings, [*reasons, "task     answering: questions on contexts"], paths, [])
    if format == "parallel":
        texts = [line for path in paths for line in islice(read_lines(path), SAMPLE_LINES)]
        reasons.append(f"task     translation: {names[0]} is the source and {names[1]} the target, line by line")
        return _finish("translation", settings, reasons, paths, texts, records=_count(paths[::2]))
    if format == "conll":
        lines = [line for path in paths for line in islice(read_lines(path), SAMPLE_LINES)]
        tags = Counter(line.split()[-1] for line in lines if len(line.split()) > 1)
        shown = ", ".join(tag for tag, _ in tags.most_common(4))
        reasons.append(f"task     tagging: the last column has {len(tags):,} tags ({shown}{', …' * (len(tags) > 4)})")
        texts = [" ".join(line.split()[:1]) for line in lines]
        share = sum(not line.strip() for line in lines) / max(1, len(lines))
        return _finish("tagging", settings, reasons, paths, texts, records=round(_count(paths) * share))
    if format == "text":
        lines = [line for path in paths for line in islice(read_lines(path), SAMPLE_LINES)]
        reasons.append("task     language-model: plain text without columns")
        return _finish("language-model", settings, reasons, paths, lines)
    return _guess_table(settings, reasons, paths)


def _format(names: list[str], paths: list[Path]) -> tuple[str, str]:
    """Return the format and why: by name, else by what the first lines look like."""
    by_name = infer_format(names)
    if by_name not in ("text", "tsv") or data_suffix(paths[0].name) == ".md":
        why = "two files of two languages" if by_name == "parallel" else "by the extension"
        return by_name, why
    lines = list(islice(read_lines(paths[0]), 200))
    filled = [line for line in lines if line.strip()]
    if not filled:
        raise UserError(f"{paths[0]} is empty; give a file with content")
    parts = [line.split("\t") if "\t" in line else line.split() for line in filled]
    tagged = sum(len(part) > 1 and bool(TAG.fullmatch(part[-1].strip())) for part in parts)
    if len(filled) < len(lines) and tagged >= TAGGED_SHARE * len(filled) and len({len(part) for part in parts}) <= 2:
        return "conll", "a token and its tag on each line, blank lines between sentences"
    if by_name == "tsv":
        return "tsv", "by the extension"
    if all(line.lstrip().startswith("{") for line in filled):
        return "jsonl", "one JSON object per line"
    if all("\t" in line for line in filled):
        return "tsv", "tabs on every line"
    if len(names) == len(paths) == 2 and (count := _count(paths[:1])) == _count(paths[1:]):
        return "parallel", f"two files of {count:,} lines each"
    return "text", "no columns"


def _guess_table(settings: dict[str, Any], reasons: list[str], paths: list[Path]) -> Guess:
    sample = _json_sample(paths) if settings["format"] == "jsonl" else _table_sample(paths, settings["format"])
    if not sample.rows:
        raise UserError(f"{paths[0]} has no records; give a file with content")
    scale = 1.0 if sample.complete else max(1.0, sum(map(_size, paths)) / max(1, sample.bytes_read))
    records = round(len(sample.rows) * scale)
    if sample.names:
        reasons[0] += f"; columns {', '.join(sample.names)}"
    lists = [n for n, value in enumerate(sample.rows[0]) if isinstance(value, list)]
    if len(lists) >= 2 and sample.names:
        tokens, tags = (sample.names[n] for n in lists[:2])
        reasons.append(f"task     tagging: {tokens!r} and {tags!r} are lists")
        settings["columns"] = {"tokens": tokens, "tags": tags}
        texts = [" ".join(map(str, row[lists[0]])) for row in sample.rows]
        return _finish("tagging", settings, reasons, paths, texts, records=records)
    columns = [
        _Column(sample.names[n] if sample.names else n + 1, [str(row[n]) for row in sample.rows])
        for n in range(len(sample.rows[0]))
    ]
    task, chosen, why, more = _choose(columns, paths[0])
    settings["columns"] = {name: column.key for name, column in chosen.items()}
    texts = [text for name, column in chosen.items() if name != "label" for text in column.values]
    reasons.append(f"task     {task}: {why}")
    return _finish(task, settings, reasons, paths, texts, records=records, **more)


def _choose(columns: list[_Column], path: Path) -> tuple[str, dict[str, _Column], str, dict[str, Any]]:
    """Return the task, its columns by role, why, and more settings."""
    texts = [column for column in columns if column.is_text and not column.is_label]
    texts = texts or [column for column in columns if column.is_sentences]
    labels = [column for column in columns if column.is_label and column not in texts]
    scores = [column for column in columns if column.is_number and len(set(column.values)) > 2]
    named = [column for column in scores if column.name in SCORE_NAMES]
    scores = named or [column for column in scores if any(number % 1 for number in column.numbers)]
    label = next((column for column in labels if column.name in LABEL_NAMES), labels[-1] if labels else None)
    if not texts:
        if repeated := next((column for column in columns if column.is_text), None):
            count = f"{len(set(repeated.values)):,} different values in {len(repeated.values):,} rows"
            raise UserError(
                f"{path}: no column has texts: {repeated.title} has only {count}, like labels; if they are texts, "
                "write a recipe of your own with data.train.columns: {text: …, label: …}"
            )
        raise UserError(f"{path}: no column has texts; give a table with a column of sentences")
    if len(texts) == 2 and scores:
        score = scores[-1]
        top = max(score.numbers)
        why = f"{_list(texts)} are texts, {score.title} a number from {min(score.numbers):g} to {top:g}"
        return "similarity", {"text": texts[0], "second": texts[1], "label": score}, why, {"max_score": top}
    if label is not None and label.name not in SCORE_NAMES:
        counts = Counter(label.values).most_common()
        shown = ", ".join(f"{name[:20]} {count:,}" for name, count in counts[:4]) + ", …" * (len(counts) > 4)
        if len(texts) == 2:
            why = f"{_list(texts)} are texts, {label.title} has {len(counts)} labels ({shown})"
            pair = {"text": texts[0], "second": texts[1], "label": label}
            return "classification", pair, why, {"text_pairs": True}
        text = max(texts, key=lambda column: sum(map(len, column.values)))
        why = f"{text.title} is the longest text, {label.title} has {len(counts)} labels ({shown})"
        return "classification", {"text": text, "label": label}, why, {}
    if len(texts) == 1 and scores:
        why = f"{texts[0].title} is text, {scores[-1].title} a number"
        return "regression", {"text": texts[0], "label": scores[-1]}, why, {}
    if len(texts) >= 2:
        why = f"{texts[0].title} is the source and {texts[1].title} the target"
        return "translation", {"source": texts[0], "target": texts[1]}, why, {}
    return "language-model", {"text": texts[0]}, f"{texts[0].title} is the only text, and there is no label", {}


def _list(columns: list[_Column]) -> str:
    return " and ".join(column.title for column in columns)


def _table_sample(paths: list[Path], format: str) -> _Sample:
    """Read the first rows of a table; the header is of the first file."""
    sample = _Sample([], [])
    for path in paths:
        limit = SAMPLE_LINES // len(paths) + 1
        rows = list(islice(_table_rows(path, format, sample), limit))
        sample.complete = sample.complete and len(rows) < limit
        header = bool(rows) and _is_header(rows)
        if header and path == paths[0]:
            sample.names = [name.strip() for name in rows[0]]
        sample.rows += rows[1:] if header else rows
    width = Counter(map(len, sample.rows)).most_common(1)[0][0] if sample.rows else 0
    if width == 1 and format == "csv":
        raise UserError(
            f"{paths[0]}: only one column; if another sign than a comma separates them, save it with commas"
        )
    sample.rows = [row for row in sample.rows if len(row) == width]
    if len(sample.names) != width or len(set(sample.names)) < width:
        sample.names = []
    return sample


def _table_rows(path: Path, format: str, sample: _Sample) -> Iterator[list[str]]:
    def lines() -> Iterator[str]:
        for line in read_lines(path):
            sample.bytes_read += len(line.encode()) + 1
            yield line + "\n"

    if format == "tsv":
        yield from (line.rstrip("\n").split("\t") for line in lines() if line.strip())
        return
    reader, first = csv.reader(lines(), strict=True), 1
    try:
        for row in reader:
            first = reader.line_num + 1
            if any(row):
                yield row
    except csv.Error as error:
        raise UserError(f"{path}, line {first}: {error}; check the quotation marks of this row") from None


def _is_header(rows: list[list[str]]) -> bool:
    """Whether the first row has names: short, distinct, no numbers, and unlike the values below."""
    first, below = rows[0], rows[1:]
    names = [name.strip() for name in first]
    if not below or len(set(names)) < len(names) or not all(names) or any(map(_is_number, names)):
        return False
    if {name.lower() for name in names} & {*LABEL_NAMES, *SCORE_NAMES, "text", "sentence", "source", "id"}:
        return True
    for n, name in enumerate(names):
        values = [row[n] for row in below if len(row) > n]
        column = _Column(n + 1, values) if values else None
        if column is None or name in values:  # a value that occurs again is a label
            return False
        if column.is_number or (column.is_label and len(name) > 1):
            return True
    return all(len(name.split()) <= 2 for name in names) and all(
        sum(len(row[n]) for row in below if len(row) > n) > 2 * len(name) * len(below) for n, name in enumerate(names)
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _json_sample(paths: list[Path]) -> _Sample:
    """Read the first objects; columns are the keys that all have, with texts, numbers or lists."""
    sample, objects = _Sample([], []), []
    for path in paths:
        limit = SAMPLE_LINES // len(paths) + 1
        for number, line in islice(enumerate(read_lines(path), start=1), limit):
            sample.complete = sample.complete and number < limit
            sample.bytes_read += len(line.encode()) + 1
            if line.strip():
                objects.append(_json_object(line, f"{path}, line {number}"))
    common = [key for key in (objects[0] if objects else {}) if all(key in item for item in objects)]
    sample.names = [key for key in common if all(isinstance(item[key], str | int | float | list) for item in objects)]
    sample.rows = [[item[key] for key in sample.names] for item in objects]
    return sample


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); write one object per line") from None
    if not isinstance(item, dict):
        raise UserError(f"{where}: not an object; write one object per line")
    return item


def _finish(
    task: str,
    settings: dict[str, Any],
    reasons: list[str],
    paths: list[Path],
    texts: list[str],
    records: int = 0,
    **more: Any,
) -> Guess:
    size, chars = sum(map(_size, paths)), sum(map(len, texts)) or 1
    wide = sum(is_wide(text) for text in texts[:1000]) > min(1000, len(texts)) // 4
    sampled = max(1, sum(len(text.encode()) for text in texts))
    tokens = round(chars * max(1.0, size / sampled) / (1.5 if wide else 4)) if texts else size // 4
    words = len({word for text in texts for word in (text if wide else text.split())})
    longest = max(map(len, texts), default=0)
    return Guess(task, settings, reasons, records, max(1, tokens), words, longest * 2 if wide else longest, **more)


def is_wide(text: str) -> bool:
    """Whether a text has Chinese, Japanese or Korean characters, which need no spaces."""
    return any("\u3040" <= character <= "\u9fff" or "\uac00" <= character <= "\ud7a3" for character in text[:200])


def _size(path: Path) -> int:
    """Bytes of a file; of a gzip file, about what it unpacks to."""
    size = path.stat().st_size
    return size * 3 if path.suffix.lower() == ".gz" else size


def _count(paths: list[Path]) -> int:
    return sum(1 for path in paths for _ in read_lines(path))
