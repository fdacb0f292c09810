"""word2vec against gensim on the novels, two threads each: words/s, quality and ratios.

    python -m bench.word2vec                one seed
    python -m bench.word2vec --seeds 3      the mean of three
    python -m bench.word2vec --books 5      quick: speed is meaningful, quality is not

Reads english_novels and wordsim from CLEARHEAD_DATA (default ../shared/data). gensim (pip install gensim) is the peer;
without it only our results are printed. Speed is raw words × epochs / training time, without reading and counting, as
gensim reports it. On a shared machine, compare words per core-second.
"""

import argparse
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clearhead.text.corpus import Corpus, read_corpus
from clearhead.text.word2vec import Training, Word2VecSettings
from clearhead.text.word_similarity import score_analogies, score_pairs
from clearhead.text.word_vectors import WordVectors

try:
    import gensim
    from gensim.models import Word2Vec
except ImportError:
    gensim = None

DIM, WINDOW, NEGATIVES, EPOCHS, MIN_COUNT, WORKERS = 100, 5, 5, 3, 5, 2
GENSIM_LR = 0.025  # gensim's default learning rate
Work = Callable[[], WordVectors]


class Result(NamedTuple):
    """Speed and quality of one run."""

    speed: float  # words/s
    core_speed: float  # words per core-second
    wordsim: float
    simlex: float
    analogies: float


def main() -> None:
    """Train with both, print speed, quality and ratios."""
    parser = argparse.ArgumentParser(prog="python -m bench.word2vec", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("CLEARHEAD_DATA", "../shared/data")))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--books", type=int, default=None, help="only this many of the novels")
    options = parser.parse_args()
    files = sorted((options.data / "english_novels").glob("*.txt.gz"))[: options.books]
    if not files:
        parser.error(f"no english_novels/*.txt.gz in {options.data}; set CLEARHEAD_DATA")
    corpus = read_corpus(files, MIN_COUNT)
    peer = f"gensim {gensim.__version__}" if gensim else "gensim is not installed: no peer (pip install gensim)"
    print(
        f"{datetime.date.today()}  torch {torch.__version__}, {peer}; "
        f"{corpus.total_words:,} words of {len(files)} novels"
    )
    print(f"{DIM} dimensions, window {WINDOW}, {NEGATIVES} negatives, {EPOCHS} epochs, {WORKERS} threads")
    lrs = [Word2VecSettings(cbow=cbow).lr for cbow in (False, True)]
    print(f"learning rates: gensim {GENSIM_LR}; clearhead skip-gram {lrs[0]}, CBOW {lrs[1]}, unless a row says so\n")
    print(f"{'':32}{'words/s':>12}{'words/core-s':>14}{'WordSim':>9}{'SimLex':>8}{'analogies':>11}")
    results: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sentences = write_sentences(read_corpus(files, 1), Path(folder) / "sentences.txt") if gensim else []
        for seed in range(1, options.seeds + 1):
            for name, prepare in contestants(corpus, sentences, Path(folder) / "sentences.txt", seed):
                result = run(prepare(), corpus.total_words * EPOCHS, options.data / "wordsim")
                results.setdefault(name, []).append(result)
                show(f"{name}, seed {seed}", result)
    print(f"\nmean of {options.seeds}")
    means = {name: Result(*map(statistics.fmean, zip(*rows, strict=True))) for name, rows in results.items()}
    for name, mean in means.items():
        show(name, mean)
    theirs = {name: mean for name, mean in means.items() if name.startswith("gensim")}
    if theirs:
        compare(means, theirs)


def contestants(
    corpus: Corpus, sentences: list[list[str]], file: Path, seed: int
) -> Iterator[tuple[str, Callable[[], Work]]]:
    """Yield each trainer for this seed: its name, and a function that prepares and returns the work to time."""
    for cbow in (False, True):
        method = "CBOW" if cbow else "skip-gram"
        if gensim:
            yield f"gensim {method} iter", lambda cbow=cbow: theirs(cbow, seed, sentences=sentences)
            yield f"gensim {method} file", lambda cbow=cbow: theirs(cbow, seed, corpus_file=str(file))
        yield f"clearhead {method}", lambda cbow=cbow: ours(corpus, cbow, seed)
        if not cbow:  # also with gensim's learning rate: our default was tuned on this data, gensim's was not
            yield f"clearhead {method} {GENSIM_LR}", lambda: ours(corpus, False, seed, lr=GENSIM_LR)


def ours(corpus: Corpus, cbow: bool, seed: int, **more: Any) -> Work:
    """Prepare our training."""
    settings = Word2VecSettings(
        dim=DIM, window=WINDOW, negatives=NEGATIVES, epochs=EPOCHS, cbow=cbow, workers=WORKERS, seed=seed, **more
    )
    training = Training(corpus, settings)

    def work() -> WordVectors:
        for _ in training:
            pass
        return training.vectors()

    return work


def theirs(cbow: bool, seed: int, **source: Any) -> Work:
    """Prepare gensim's training; its vocabulary is already built."""
    model = Word2Vec(
        vector_size=DIM, window=WINDOW, negative=NEGATIVES, epochs=EPOCHS, min_count=MIN_COUNT, workers=WORKERS,
        sg=int(not cbow), seed=seed,
    )  # fmt: skip
    model.build_vocab(**({"corpus_iterable": source["sentences"]} if "sentences" in source else source))

    def work() -> WordVectors:
        count = {"total_examples": model.corpus_count, "total_words": model.corpus_total_words, "epochs": EPOCHS}
        model.train(**({"corpus_iterable": source["sentences"]} if "sentences" in source else source), **count)
        return WordVectors(model.wv.index_to_key, torch.from_numpy(model.wv.vectors))

    return work


def write_sentences(corpus: Corpus, file: Path) -> list[list[str]]:
    """Return the corpus as lists of words, and write it to a file, one sentence per line."""
    pairs = zip(corpus.sentences.tolist(), corpus.ids.tolist(), strict=True)
    sentences = [[corpus.vocab[number] for _, number in group] for _, group in groupby(pairs, key=lambda pair: pair[0])]
    file.write_text("".join(" ".join(words) + "\n" for words in sentences), encoding="utf-8")
    return sentences


def run(work: Work, words: int, tests: Path) -> Result:
    """Time the training and evaluate its vectors."""
    start, cpu_start = time.perf_counter(), time.process_time()
    vectors = work()
    seconds, core_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    wordsim, simlex = (score_pairs(vectors, tests / name).spearman for name in ("wordsim353.tsv", "simlex999.txt"))
    sections = score_analogies(vectors, tests / "questions-words.txt")
    analogies = sum(section.correct for section in sections) / sum(section.total for section in sections)
    return Result(words / seconds, words / core_seconds, wordsim, simlex, analogies)


def show(name: str, result: Result) -> None:
    """Print a line of the table."""
    speed, core_speed, wordsim, simlex, analogies = result
    print(f"{name:32}{speed:>12,.0f}{core_speed:>14,.0f}{wordsim:>9.3f}{simlex:>8.3f}{analogies:>11.1%}", flush=True)


def compare(means: dict[str, Result], theirs: dict[str, Result]) -> None:
    """Print our ratios to the faster gensim run of the same method, and to the fastest of all."""
    fastest = max(theirs, key=lambda name: theirs[name].speed)
    print()
    for method in ("skip-gram", "CBOW"):
        same = max((name for name in theirs if method in name), key=lambda name: theirs[name].speed)
        for rival in dict.fromkeys([same, fastest]):
            for name in (each for each in means if each.startswith(f"clearhead {method}")):
                our, their = means[name], theirs[rival]
                print(
                    f"{name} / {rival}: words/s {our.speed / their.speed:.2f}, words/core-s "
                    f"{our.core_speed / their.core_speed:.2f} (target: at least 1); "
                    f"WordSim {our.wordsim - their.wordsim:+.3f} (target: at least -0.020)"
                )


if __name__ == "__main__":
    main()
