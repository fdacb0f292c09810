"""Real corpora for tests, from the folder in CLEARHEAD_DATA; where one is missing the test is skipped, and says so."""

import os
from pathlib import Path

import pytest

from clearhead.files import read_lines

FOLDER = Path(os.environ.get("CLEARHEAD_DATA", Path(__file__).parents[2] / "shared" / "data"))


def corpus(name: str) -> Path:
    """A file or folder of the shared data."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no {name} in {FOLDER}; set CLEARHEAD_DATA to the folder with the corpora")
    return path


def mixed_lines(count: int) -> list[str]:
    """Lines of novels, WikiText-2 and Tatoeba in three languages, about as many of each."""
    novels = sorted(corpus("english_novels").glob("*.txt.gz"))
    files = [
        *novels[:: max(1, len(novels) // 6)],
        *(corpus(f"wikitext-2/{part}.txt.gz") for part in ("train", "test")),
        corpus("tatoeba_en_zh/cmn.txt.gz"),
        corpus("tatoeba_en_de/deu.txt.gz"),  # the largest, fills up what the others lack
    ]
    share = count // len(files) + 1
    lines: list[str] = []
    for number, path in enumerate(files):
        every = [line for line in read_lines(path) if line]
        wanted = min(len(every), share, count - len(lines)) if number < len(files) - 1 else count - len(lines)
        lines += every[:: max(1, len(every) // max(1, wanted))][:wanted]
    return lines
