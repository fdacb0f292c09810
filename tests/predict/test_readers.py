"""Models that are replaced while others load them: a load gives a complete model of the right name, never another.

CLEARHEAD_LOADS=10000 sets the number of loads instead of 60.
"""

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from clearhead.checkpoint import model_folder_info, save_model
from clearhead.predict import load
from clearhead.predict.find import local_models
from clearhead.text import Tokenizer
from tests.checkpoint.small_models import network, tokenizer
from tests.checkpoint.test_crash import dies_at

LOADS = int(os.environ.get("CLEARHEAD_LOADS", "60"))


@pytest.fixture(scope="module")
def text_tokenizer() -> Tokenizer:
    return tokenizer()


def save(run: Path, part: str, number: int, text_tokenizer: Tokenizer) -> None:
    """Save a model whose weights all have this value."""
    model = network()
    for parameter in model.parameters():
        parameter.data.fill_(number / 1024)
    save_model(run / part, model, text_tokenizer, {"part": part, "number": number})


def check(model: Any, part: str) -> int:
    """Check that all weights are of one save of this part; return its number."""
    assert model.extra["part"] == part, "another model was loaded"
    number: int = model.extra["number"]
    for name, parameter in model.network.named_parameters():
        assert bool((parameter == number / 1024).all()), f"{name} is of another save"
    return number


def test_best_is_never_taken_for_last_at_any_crash_point(
    tmp_path: Path, text_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, number, dies, loaded = Path("runs/one"), 15, True, []  # earlier ones only write the temporary folder
    while dies:
        number += 1
        shutil.rmtree(run, ignore_errors=True)
        save(run, "best", 1, text_tokenizer)
        save(run, "last", 1, text_tokenizer)
        dies = dies_at(number, lambda: save(run, "best", 2, text_tokenizer))
        loaded.append(check(load(run, "cpu"), "best"))
        assert check(load(run / "best", "cpu"), "best") == loaded[-1]
        assert local_models() == {"runs/one": run / "best"}
        assert model_folder_info(run / "best").extra["number"] == loaded[-1]
    assert loaded == sorted(loaded)
    assert {*loaded} == {1, 2}
    print(f"{len(loaded)} crash points, {2 * len(loaded)} loads, 0 wrong models")


def test_loads_while_processes_and_threads_replace_the_models(tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    run = tmp_path / "run"
    for part in ("best", "last"):
        save(run, part, 1, text_tokenizer)
    writers = [start_writer(run, part, seed, text_tokenizer) for seed, part in enumerate(("best", "last"))]
    stop, seen, errors = threading.Event(), set[int](), []

    def replace() -> None:
        number = 1
        while not stop.is_set():
            number += 1
            save(run, "best", 4 * number, text_tokenizer)

    def read(loads: int) -> None:
        try:
            for count in range(loads):
                name, part = [(run, "best"), (run / "best", "best"), (run / "last", "last")][count % 3]
                seen.add(check(load(name, "cpu"), part))
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read, args=(LOADS // 2,)) for _ in range(2)]
    writer = threading.Thread(target=replace)
    try:
        for thread in (*readers, writer):
            thread.start()
        for thread in readers:
            thread.join()
    finally:
        stop.set()
        writer.join()
        for child in writers:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if errors:
        raise errors[0]
    assert len(seen) > 5, "the models were replaced meanwhile"
    check(load(run, "cpu"), "best")
    for part in ("best", "last"):  # clean up after the killed writers
        save(run, part, 1, text_tokenizer)
    assert {path.name for path in run.iterdir()} == {"best", "last"}
    print(f"{LOADS} loads of {len(seen)} saves by two processes and a thread, 0 wrong models, 0 errors")


def start_writer(run: Path, part: str, seed: int, text_tokenizer: Tokenizer) -> int:
    """Start a process that replaces a model until it is killed; return its process id."""
    child = os.fork()
    if child == 0:
        try:
            number = 1
            while True:
                number += 1
                save(run, part, 4 * number + 1 + seed, text_tokenizer)
        finally:
            os._exit(1)
    return child
