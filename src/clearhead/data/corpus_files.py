"""Find the files of a corpus: by path, pattern or folder, as given or below the data folders."""

import gzip
import os
import zlib
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

from clearhead.config.data import FORMAT_OF_SUFFIX, TEXT_SUFFIXES, Corpus, data_suffix
from clearhead.data.public_datasets import public_datasets
from clearhead.errors import UserError

SAMPLE_BYTES = 4096  # read to tell text from other data


def find_file(name: str, source_url: str = "") -> Path:
    """Locate a file: as given, below CLEARHEAD_DATA, or below ./data."""
    if name == "-":
        raise UserError("files: standard input can be read only once; save it to a file first")
    for path in _places(name):
        if os.path.exists(path):  # Path.exists raises if a folder is not searchable
            return path
    below = name.removeprefix("data/")
    fix = f"check the path, put it under data/{below}, or set CLEARHEAD_DATA to the folder that has {below}"
    if Path(name).is_absolute():
        fix = "check the path"
    elif (dataset := below.partition("/")[0]) in public_datasets():
        fix = f"run: clearhead data {dataset}, or set CLEARHEAD_DATA to the folder that has {below}"
    raise UserError(f"{name} does not exist; {fix}" + (f"; it is published at {source_url}" if source_url else ""))


def corpus_files(corpus: Corpus, source_url: str = "") -> list[Path]:
    """List the files of a corpus; of parallel ones, source and target alternate."""
    return files_of_corpus(corpus, source_url)[0]


def files_of_corpus(corpus: Corpus, source_url: str = "") -> tuple[list[Path], list[Path]]:
    """List the files of a corpus, and the files in its folders that are left out.

    A pattern (`novels/*.txt`) stands for the files that match it, a folder for the files in it that can be of the
    corpus's format; both are sorted by name.
    """
    groups, left_out = [], list[Path]()
    for name in corpus.files:
        group = []
        for path in _find_pattern(name, source_url):
            inside, others = _files_in(path, corpus.format) if path.is_dir() else ([path], [])
            group += inside
            left_out += others
        groups.append(group)
    if corpus.format != "parallel":
        return [path for group in groups for path in group], left_out
    pairs = list(zip(groups[::2], groups[1::2], strict=True))
    for n, (sources, targets) in enumerate(pairs):
        if len(sources) != len(targets):
            names = corpus.files[2 * n : 2 * n + 2]
            raise UserError(
                f"files: {names[0]} has {len(sources):,} files and {names[1]} has {len(targets):,}; parallel needs "
                "pairs of a source and a target"
            )
    return [path for pair in pairs for both in zip(*pair, strict=True) for path in both], left_out


def _places(name: str) -> Iterator[Path]:
    yield Path(name)
    yield Path(os.environ.get("CLEARHEAD_DATA", "../shared/data")) / name
    yield Path("data") / name


def _find_pattern(name: str, source_url: str) -> list[Path]:
    """Return the paths that a name or pattern stands for, in the first place that has any."""
    if not has_magic(name) or any(map(os.path.exists, _places(name))):
        return [find_file(name, source_url)]
    for place in _places(name):
        if found := sorted(glob(str(place), recursive=True)):
            return [Path(path) for path in found]
    raise UserError(f"{name}: no file matches this pattern; check it, or put the files under data/")


def _files_in(folder: Path, format: str) -> tuple[list[Path], list[Path]]:
    """Split the files in a folder into those that can be of a format, and others."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    if not files:
        raise UserError(f"{folder} is an empty folder; give a file, or a folder with files")
    chosen = [file for file in files if _can_be(file, format)]
    if not chosen:
        names = ", ".join(dict.fromkeys(data_suffix(file.name) or file.name for file in files))
        raise UserError(f"{folder} has no {format} files, only {names:.100}; name the files, or set format")
    return chosen, [file for file in files if file not in chosen]


def _can_be(file: Path, format: str) -> bool:
    """Whether a file can be of a format: by its name, else by whether it is text."""
    suffix = data_suffix(file.name)
    if suffix in FORMAT_OF_SUFFIX:
        return FORMAT_OF_SUFFIX[suffix] == format or (suffix == ".json" and format == "jsonl")
    return suffix in TEXT_SUFFIXES or is_text(file)


def is_text(file: Path) -> bool:
    """Whether a file, plain or gzip, begins with UTF-8 text; True if it cannot be read, so that reading it says why."""
    try:
        with file.open("rb") as plain:
            is_gzip = plain.read(2) == b"\x1f\x8b"
        with gzip.open(file) if is_gzip else file.open("rb") as stream:
            sample = stream.read(SAMPLE_BYTES)
    except (OSError, EOFError, zlib.error):
        return True
    try:
        sample.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start < len(sample) - 3:  # not a character cut in two by the end of the sample
            return False
    return b"\0" not in sample
