"""word2vec against gensim on the novels: words per second and quality, in turn in one run, two threads each.

    python -m bench.word2vec                one seed
    python -m bench.word2vec --seeds 3      the mean of three
    python -m bench.word2vec --books 5      quick: rates mean something, scores do not

Reads english_novels and wordsim from CLEARHEAD_DATA (default ../shared/data). gensim (pip install gensim) is the peer;
without it only our own figures are printed. Rates are raw words × epochs / time of training, reading and counting left
out, as gensim counts. On a machine that others use too, the rate a core-second says more than the rate a second.
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
from clearhead.text.similarity import score_analogies, score_pairs
from clearhead.text.vectors import WordVectors
from clearhead.text.word2vec import Training, Word2VecSettings

try:
    import gensim
    from gensim.models import Word2Vec
except ImportError:
    gensim = None

DIM, WINDOW, NEGATIVES, EPOCHS, MIN_COUNT, WORKERS = 100, 5, 5, 3, 5, 2
THEIR_RATE = 0.025  # gensim's learning rate unless told otherwise
Work = Callable[[], WordVectors]


class Result(NamedTuple):
    """One run."""

    rate: float
    core_rate: float
    wordsim: float
    simlex: float
    analogies: float


def main() -> None:
    """Train with both, print rates, scores and ratios."""
    parser = argparse.ArgumentParser(prog="python -m bench.word2vec", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("CLEARHEAD_DATA", "../shared/data")))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--books", type=int, default=None, help="only this many of the novels")
    options = parser.parse_args()
    files = sorted((options.data / "english_novels").glob("*.txt.gz"))[: options.books]
    if not files:
        parser.error(f"no english_novels/*.txt.gz in {options.data}; set CLEARHEAD_DATA")
    corpus = read_corpus(files, MIN_COUNT)
    peer = f"gensim {gensim.__version__}" if gensim else "gensim is not installed: ours alone (pip install gensim)"
    print(
        f"{datetime.date.today()}  torch {torch.__version__}, {peer}; {corpus.raw_words:,} words of {len(files)} novels"
    )
    print(f"{DIM} dimensions, window {WINDOW}, {NEGATIVES} negatives, {EPOCHS} epochs, {WORKERS} threads")
    rates = [Word2VecSettings(cbow=cbow).learning_rate for cbow in (False, True)]
    print(f"learning rates: gensim {THEIR_RATE}; ours skip-gram {rates[0]}, CBOW {rates[1]}, unless a row says so\n")
    print(f"{'':32}{'words/s':>12}{'per core-s':>12}{'WordSim':>9}{'SimLex':>8}{'analogies':>11}")
    results: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sentences = write_sentences(read_corpus(files, 1), Path(folder) / "sentences.txt") if gensim else []
        for seed in range(1, options.seeds + 1):
            for name, prepare in contestants(corpus, sentences, Path(folder) / "sentences.txt", seed):
                result = run(prepare(), corpus.raw_words * EPOCHS, options.data / "wordsim")
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
    """Everyone who trains with this seed, each as a function that prepares and returns the work to time."""
    for cbow in (False, True):
        method = "CBOW" if cbow else "skip-gram"
        if gensim:
            yield f"gensim {method} iter", lambda cbow=cbow: theirs(cbow, seed, sentences=sentences)
            yield f"gensim {method} file", lambda cbow=cbow: theirs(cbow, seed, corpus_file=str(file))
        yield f"ours {method}", lambda cbow=cbow: ours(corpus, cbow, seed)
        if not cbow:  # like for like: our default was chosen on these novels and these tests, gensim's was not
            yield f"ours {method} {THEIR_RATE}", lambda: ours(corpus, False, seed, learning_rate=THEIR_RATE)


def ours(corpus: Corpus, cbow: bool, seed: int, **more: Any) -> Work:
    """Our training, ready to go."""
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
    """gensim's training, vocabulary built, ready to go."""
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
    """The corpus as lists of words, in memory and as a file, a sentence a line."""
    pairs = zip(corpus.sentences.tolist(), corpus.ids.tolist(), strict=True)
    sentences = [[corpus.words[number] for _, number in group] for _, group in groupby(pairs, key=lambda pair: pair[0])]
    file.write_text("".join(" ".join(words) + "\n" for words in sentences), encoding="utf-8")
    return sentences


def run(work: Work, words: int, tests: Path) -> Result:
    """Time the work and score what it gives."""
    begun, core = time.perf_counter(), time.process_time()
    vectors = work()
    seconds, core_seconds = time.perf_counter() - begun, time.process_time() - core
    wordsim, simlex = (score_pairs(vectors, tests / name).spearman for name in ("wordsim353.tsv", "simlex999.txt"))
    sections = score_analogies(vectors, tests / "questions-words.txt")
    right = sum(section.right for section in sections) / sum(section.asked for section in sections)
    return Result(words / seconds, words / core_seconds, wordsim, simlex, right)


def show(name: str, result: Result) -> None:
    """A line of the table."""
    rate, core_rate, wordsim, simlex, right = result
    print(f"{name:32}{rate:>12,.0f}{core_rate:>12,.0f}{wordsim:>9.3f}{simlex:>8.3f}{right:>11.1%}", flush=True)


def compare(means: dict[str, Result], theirs: dict[str, Result]) -> None:
    """Each of ours over the faster of gensim's for the same method, and over the fastest of all."""
    fastest = max(theirs, key=lambda name: theirs[name].rate)
    print()
    for method in ("skip-gram", "CBOW"):
        same = max((name for name in theirs if method in name), key=lambda name: theirs[name].rate)
        for rival in dict.fromkeys([same, fastest]):
            for name in (each for each in means if each.startswith(f"ours {method}")):
                our, their = means[name], theirs[rival]
                print(
                    f"{name} / {rival}: words/s {our.rate / their.rate:.2f}, per core-second "
                    f"{our.core_rate / their.core_rate:.2f} (at least 1); WordSim {our.wordsim - their.wordsim:+.3f} "
                    "(at least -0.020)"
                )


if __name__ == "__main__":
    main()
