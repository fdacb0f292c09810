"""Tokenizer training and encoding speed against the plain `tokenizers` library, on the novels.

    python -m bench.tokenize                reads english_novels from CLEARHEAD_DATA (default ../shared/data)

Ours adds line numbers for error messages, counts, and special tokens by role.
"""

import argparse
import datetime
import gzip
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from clearhead.text import train_files


def main() -> None:
    """Train and encode with both, print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m bench.tokenize", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("CLEARHEAD_DATA", "../shared/data")))
    parser.add_argument("--size", type=int, default=8000, help="vocabulary size")
    options = parser.parse_args()
    files = sorted((options.data / "english_novels").glob("*.txt.gz"))
    if not files:
        parser.error(f"no english_novels/*.txt.gz in {options.data}; set CLEARHEAD_DATA")
    print(
        f"{datetime.date.today()}  tokenizers {tokenizers.__version__}, {os.cpu_count()} cores, {len(files)} novels\n"
    )

    def lines() -> Iterator[str]:
        for file in files:
            with gzip.open(file, "rt", encoding="utf-8") as stream:
                yield from stream

    def train_peer() -> tokenizers.Tokenizer:
        engine = tokenizers.Tokenizer(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<pad>", "<begin>", "<end>"]
        trainer = trainers.BpeTrainer(
            vocab_size=options.size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        )
        engine.train_from_iterator(lines(), trainer)
        return engine

    their_time = our_time = float("inf")
    for _ in range(3):  # alternating, the best of three
        theirs, seconds = timed(train_peer)
        their_time = min(their_time, seconds)
        ours, seconds = timed(lambda: train_files(files, "byte-bpe", options.size))
        our_time = min(our_time, seconds)
    print(f"training, vocabulary {options.size:,}   tokenizers {their_time:6.1f} s   clearhead {our_time:6.1f} s   "
          f"time ratio {our_time / their_time:.2f} (target: at most 1.20)")  # fmt: skip

    texts = [line.rstrip("\n") for line in lines()]
    size = sum(len(text.encode()) for text in texts)
    their_speed = our_speed = 0.0  # bytes/s
    for _ in range(3):  # alternating, the best of three
        _, seconds = timed(
            lambda: [encoding.ids for encoding in theirs.encode_batch_fast(texts, add_special_tokens=False)]
        )
        their_speed = max(their_speed, size / seconds)
        _, seconds = timed(lambda: ours.encode_batch(texts))
        our_speed = max(our_speed, size / seconds)
    print(f"encoding {size / 1e6:.0f} MB   tokenizers {their_speed / 1e6:6.1f} MB/s   "
          f"clearhead {our_speed / 1e6:6.1f} MB/s   "
          f"speed ratio {our_speed / their_speed:.2f} (target: at least 0.80)")  # fmt: skip


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return a function's result and its seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
