"""Data loader throughput from the token cache: tokens/s, padding, and peak memory on gigabytes of text.

python -m bench.data                 Multi30k at 4,096 padded tokens, and the novels as a language model
python -m bench.data --repeat 50     the novels fifty times (2 GB of text)

Memory is anonymous memory: memory-mapped files do not count. There is no peer; the ratio is to one loader process.
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


class PeakMemory(threading.Thread):
    """Peak anonymous memory of this process in MB, sampled every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self.start()

    def run(self) -> None:
        """Sample until the process ends."""
        while True:
            status = Path("/proc/self/status").read_text()
            self.peak = max(self.peak, int(status.split("RssAnon:")[1].split()[0]) / 1024)
            time.sleep(0.005)


def throughput(name: str, loader: Loader, seconds: float, baseline: float | None = None) -> float:
    """Print and return a loader's tokens/s, measured for some seconds; with a `baseline`, print the ratio to it."""
    steps = iter(loader)
    next(steps)  # fill the first bucket
    tokens = padded = batches = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for batch in next(steps).batches:
            tokens, padded, batches = tokens + batch.num_tokens, padded + batch.padded_tokens, batches + 1
    elapsed = time.perf_counter() - start
    steps.close()
    speed = tokens / elapsed
    ratio = "" if baseline is None else f"   ratio {speed / baseline:.2f}"
    print(
        f"{name:34} {speed / 1e6:6.1f} M tokens/s   {batches / elapsed:7.0f} batches/s   "
        f"{1 - tokens / padded:.1%} padding{ratio}",
        flush=True,
    )
    return speed


def main() -> None:
    """Measure the loaders, print tokens/s and memory."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=0, help="read the novels this many times; skips Multi30k")
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    parser.add_argument("--cache", default="", help="keep the token cache in this folder instead of a temporary one")
    options = parser.parse_args()
    print(machine(torch.device("cpu")))
    memory = PeakMemory()
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or folder
        if not options.repeat:
            files = tuple(str(ROOT / f"multi30k/train.{side}.gz") for side in ("en", "de"))
            config = DataConfig(
                task="translation", train=(Corpus(format="parallel", files=files),), cache_dir=cache, packed=False
            )
            data = prepare(config, TokenizerConfig(vocab_size=8000))
            baseline = None
            for workers in (0, 2):
                loader = Loader(data.train, batch_tokens=4096, workers=workers)
                name = f"multi30k, 4,096 tokens, {workers} workers"
                baseline = throughput(name, loader, options.seconds, baseline)
        novels = sorted(str(path) for path in (ROOT / "english_novels").glob("*.gz")) * max(1, options.repeat)
        config = DataConfig(
            task="language-model",
            train=(Corpus(files=tuple(novels)),),
            max_length=1024,
            cache_dir=cache,
            documents="file",
        )
        sample = DataConfig(task="language-model", train=(Corpus(files=tuple(novels[:4])),), cache_dir=cache)
        tokenizer = prepare(sample, TokenizerConfig(vocab_size=8000)).tokenizers
        start = time.perf_counter()
        data = prepare(config, tokenizer)
        seconds = time.perf_counter() - start
        total = data.train.stores[0].num_values("ids")
        print(f"tokenized {total / 1e6:.0f} M tokens in {seconds:.0f} s; peak anonymous memory {memory.peak:.0f} MB")
        start = time.perf_counter()
        prepare(config, tokenizer)
        print(f"start from the cache: {time.perf_counter() - start:.2f} s")
        throughput(
            "novels, 32 windows of 1,024", Loader(data.train, batch_tokens=32 * 1024, workers=2), options.seconds
        )
        print(f"peak anonymous memory {memory.peak:.0f} MB")


if __name__ == "__main__":
    main()
