"""Our tokenizers against the bare `tokenizers` library: training on all novels, and encoding them.

    python -m bench.tokenize                reads english_novels from CLEARHEAD_DATA (default ../shared/data)

The wrapper does the same work plus reading lines with line numbers for errors, counting, and special tokens by role.
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
    parser.add_argument("--size", type=int, default=8000)
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

    def bare() -> tokenizers.Tokenizer:
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
    for _ in range(3):  # in turn, the best of three each
        theirs, seconds = timed(bare)
        their_time = min(their_time, seconds)
        ours, seconds = timed(lambda: train_files(files, "byte-bpe", options.size))
        our_time = min(our_time, seconds)
    print(f"train {options.size:,} pieces   bare {their_time:6.1f} s   ours {our_time:6.1f} s   "
          f"ours/bare {our_time / their_time:.2f} (at most 1.20)")  # fmt: skip

    texts = [line.rstrip("\n") for line in lines()]
    size = sum(len(text.encode()) for text in texts)
    rates = {"bare": 0.0, "ours": 0.0}
    for _ in range(3):  # in turn, the best of three each
        _, seconds = timed(lambda: [found.ids for found in theirs.encode_batch_fast(texts, add_special_tokens=False)])
        rates["bare"] = max(rates["bare"], size / seconds)
        _, seconds = timed(lambda: ours.encode_batch(texts))
        rates["ours"] = max(rates["ours"], size / seconds)
    bare_rate, our_rate = (rates[name] / 1e6 for name in ("bare", "ours"))
    print(f"encode {size / 1e6:.0f} MB        bare {bare_rate:6.1f} MB/s ours {our_rate:6.1f} MB/s "
          f"ours/bare {our_rate / bare_rate:.2f} (at least 0.80)")  # fmt: skip


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What the work gives, and how long it took."""
    begun = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begun


if __name__ == "__main__":
    main()
