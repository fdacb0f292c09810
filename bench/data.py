"""The loader from its cache: tokens per second, share of real tokens, and memory on a corpus of gigabytes.

python -m bench.data                 Multi30k at 4,096 padded tokens, and the novels as a language model
python -m bench.data --repeat 50     the novels fifty times (2 GB of text): peak anonymous memory
"""

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

import torch

from bench.timing import machine
from clearhead.config.data import Corpus, DataConfig, TokenizerConfig
from clearhead.data import Loader, prepare

ROOT = Path(os.environ.get("CLEARHEAD_DATA", "../shared/data"))


class AnonymousMemory(threading.Thread):
    """The most anonymous memory this process has held, read every few milliseconds; mapped files do not count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self.start()

    def run(self) -> None:
        """Look again and again."""
        while True:
            status = Path("/proc/self/status").read_text()
            self.peak = max(self.peak, int(status.split("RssAnon:")[1].split()[0]) / 1024)
            time.sleep(0.005)


def rate(name: str, loader: Loader, seconds: float) -> None:
    """Print what comes out of a loader for some seconds."""
    steps = iter(loader)
    next(steps)  # the first pool
    real = size = batches = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for batch in next(steps).batches:
            real, size, batches = real + batch.tokens, size + batch.size, batches + 1
    spent = time.perf_counter() - start
    steps.close()
    share = f"{real / size:.1%} real"
    print(f"{name:34} {real / spent / 1e6:6.1f} M tokens/s   {batches / spent:7.0f} batches/s   {share}", flush=True)


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=0, help="read the novels so many times")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--cache", default="", help="keep the token cache here instead of a temporary folder")
    options = parser.parse_args()
    print(machine(torch.device("cpu")))
    memory = AnonymousMemory()
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or folder
        if not options.repeat:
            pair = [str(ROOT / f"multi30k/train.{side}.gz") for side in ("en", "de")]
            config = DataConfig(
                task="translation", train=(Corpus(format="parallel", files=tuple(pair)),), cache_dir=cache, packed=False
            )
            data = prepare(config, TokenizerConfig(vocab_size=8000))
            for workers in (0, 2):
                rate(
                    f"multi30k, 4,096 tokens, {workers} workers",
                    Loader(data.train, tokens=4096, workers=workers),
                    options.seconds,
                )
        novels = sorted(str(path) for path in (ROOT / "english_novels").glob("*.gz")) * max(1, options.repeat)
        config = DataConfig(
            task="language-model",
            train=(Corpus(files=tuple(novels)),),
            max_length=1024,
            cache_dir=cache,
            documents="file",
        )
        trained = DataConfig(task="language-model", train=(Corpus(files=tuple(novels[:4])),), cache_dir=cache)
        tokenizer = prepare(trained, TokenizerConfig(vocab_size=8000)).tokenizers
        start = time.perf_counter()
        data = prepare(config, tokenizer)
        spent = time.perf_counter() - start
        total = data.train.stores[0].total("ids")
        print(f"tokenized {total / 1e6:.0f} M tokens in {spent:.0f} s; anonymous memory up to {memory.peak:.0f} MB")
        start = time.perf_counter()
        prepare(config, tokenizer)
        print(f"second start: {time.perf_counter() - start:.2f} s")
        rate("novels, 32 windows of 1,024", Loader(data.train, tokens=32 * 1024, workers=2), options.seconds)
        print(f"peak anonymous memory {memory.peak:.0f} MB")


if __name__ == "__main__":
    main()
