"""Real corpora for tests, from the folder CLEARHEAD_DATA; tests skip if one is missing."""

import os
from pathlib import Path

import pytest

from clearhead.files import read_lines

FOLDER = Path(os.environ.get("CLEARHEAD_DATA", Path(__file__).parents[2] / "shared" / "data"))


def corpus(name: str) -> Path:
    """Return the path of a file or folder of the shared data."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no {name} in {FOLDER}; set CLEARHEAD_DATA to the folder with the corpora")
    return path


def mixed_lines(count: int) -> list[str]:
    """Return lines of novels, WikiText-2 and Tatoeba in three languages, about equally many of each."""
    novels = sorted(corpus("english_novels").glob("*.txt.gz"))
    files = [
        *novels[:: max(1, len(novels) // 6)],
        *(corpus(f"wikitext-2/{part}.txt.gz") for part in ("train", "test")),
        corpus("tatoeba_en_zh/cmn.txt.gz"),
        corpus("tatoeba_en_de/deu.txt.gz"),  # the largest; makes up for short ones
    ]
    per_file = count // len(files) + 1
    lines: list[str] = []
    for number, path in enumerate(files):
        available = [line for line in read_lines(path) if line]
        size = min(len(available), per_file, count - len(lines)) if number < len(files) - 1 else count - len(lines)
        lines += available[:: max(1, len(available) // max(1, size))][:size]
    return lines
