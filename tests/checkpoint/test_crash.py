"""Processes that die while they save: whatever the moment, the newest state that was saved is there and whole.

CLEARHEAD_KILLS=200 makes a torture run of the SIGKILL test.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from clearhead.checkpoint import load_model, newest_state, read_state, run_lock, save_model, save_state
from clearhead.errors import UserError
from clearhead.text import Tokenizer
from tests.checkpoint.small import contents, equal, network, tokenizer

KILLS = int(os.environ.get("CLEARHEAD_KILLS", "10"))
OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate"}


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tokenizer()


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process, which ends without any clearing up; gives its exit code."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # whatever it was must not come back as a second pytest
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dies_at(number: int, work: Callable[[], object]) -> bool:
    """Whether a process that does the work dies, if its file operation of this number kills it before it happens."""

    def counted() -> None:
        left = [number]

        def hook(event: str, _: Any) -> None:
            if event in OPERATIONS:
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)

        sys.addaudithook(hook)
        work()

    code = in_child(counted)
    assert code in (0, 9)
    return code == 9


def test_a_model_is_the_old_or_the_new_one_whichever_operation_is_the_last(tmp_path: Path, words: Tokenizer) -> None:
    folder = tmp_path / "run" / "best"
    seen, number, dies = [], 0, True
    while dies:
        number += 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        save_model(folder, network(0), words, {"seed": 0})
        (folder / "notes.txt").write_text("mine")
        dies = dies_at(number, lambda: save_model(folder, network(1), words, {"seed": 1}))
        loaded = load_model(folder)
        seed = loaded.extra["seed"]
        seen.append(seed)
        assert equal(loaded.network.state_dict(), network(seed).state_dict())
        save_model(folder, network(2), words, {"seed": 2})  # the next one clears up
        assert load_model(folder).extra == {"seed": 2}
        assert [path.name for path in folder.parent.iterdir()] == ["best"]
        assert (folder / "notes.txt").read_text() == "mine"
    assert len(seen) > 20
    assert seen == sorted(seen), "from one operation on, it is the new one"
    assert set(seen) == {0, 1}


def test_a_first_model_is_there_whole_or_not_at_all(tmp_path: Path, words: Tokenizer) -> None:
    number, dies = 0, True
    while dies:
        number += 1
        folder = tmp_path / str(number) / "model"
        dies = dies_at(number, lambda: save_model(folder, network(), words))  # noqa: B023
        if folder.exists() or not dies:
            load_model(folder)
        else:
            with pytest.raises(UserError, match="is not there"):
                load_model(folder)
    assert number > 10


@pytest.mark.parametrize("last", [2, 3])
def test_the_newest_state_is_whole_whichever_operation_is_the_last(last: int, tmp_path: Path) -> None:
    """Saving step 3 after 1 and 2 and, as after a resume, 3 anew; `keep` then deletes step 1."""
    run, number, dies, seen = tmp_path / "run", 0, True, []
    while dies:
        number += 1
        shutil.rmtree(run, ignore_errors=True)
        for step in range(1, last + 1):
            _save(run, step)
        dies = dies_at(number, lambda: _save(run, 3))
        state, refused = newest_state(run)
        assert state is not None
        assert refused == []
        assert state.step in (2, 3)
        assert state.weights()["weight"][0] == state.step
        seen.append(state.step)
        for folder in (run / "checkpoints").glob("step-*"):
            read_state(folder)  # one that is half deleted no longer has its name
        with run_lock(run):
            names = {path.name for path in (run / "checkpoints").iterdir()}
        assert {f"step-0000000{seen[-1]}", "step-00000002"} <= names <= {f"step-0000000{n}" for n in (1, 2, 3)}
    assert len(seen) > 20
    assert seen[-1] == 3


def _save(run: Path, step: int) -> None:
    save_state(run, step, {"weight": torch.full((5000,), step)}, {"moment": torch.zeros(9000)}, {"step": step}, keep=2)


def test_killed_training_goes_on_from_the_last_state_it_saved(tmp_path: Path, words: Tokenizer) -> None:
    """SIGKILL at random moments of a process that does nothing but save; the next one starts where it was."""
    inside = saved = 0
    chance = random.Random(0)
    for _ in range(KILLS):
        child, told = _trainer(tmp_path, words)
        lines = [told.readline() for _ in range(1 + 2 * chance.randrange(3))]  # until it begins its first save or third
        time.sleep(chance.choice([0, chance.uniform(0, 0.05)]))  # at once is inside the save it has just begun
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with told:
            lines += told.readlines()
        assert all(line.startswith(("begin", "saved")) for line in lines), lines
        inside += lines[-1].startswith("begin")
        saved = max([saved, *(int(line.split()[1]) for line in lines if line.startswith("saved"))])
        state, refused = newest_state(tmp_path)
        assert refused == []
        newest = 0 if state is None else state.step
        assert saved <= newest <= saved + 1, "what was saved is there; at most the one being saved is not"
        saved = newest
        if state is not None:
            assert torch.equal(state.weights()["weight"], torch.full((5000,), newest))
        if (tmp_path / "best").exists() or (tmp_path / ".best.old").exists():
            best = load_model(tmp_path / "best")
            assert best.extra["step"] <= newest
            assert equal(best.network.state_dict(), network(best.extra["step"]).state_dict())
    assert saved > KILLS / 4, "it did get on"
    assert inside >= KILLS / 10, "moments inside a save were among them"
    with run_lock(tmp_path):
        places = {path.parent.name for path in tmp_path.rglob("*.safetensors")}
    assert len(places) <= 3, "two states and the best model are all that is left"
    print(f"{KILLS} kills, {inside} inside a save, {saved} states saved")


def _trainer(run: Path, words: Tokenizer) -> tuple[int, TextIO]:
    """A process that saves state after state, and what it says."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _train(run, words, writes)
        except BaseException as error:
            os.write(writes, f"{error!r}\n".encode())
        os._exit(1)
    os.close(writes)
    return child, os.fdopen(reads, encoding="utf-8")


def _train(run: Path, words: Tokenizer, writes: int) -> None:
    with run_lock(run):
        state, _ = newest_state(run)
        step = 0 if state is None else state.step
        while True:
            step += 1
            os.write(writes, f"begin {step}\n".encode())
            _save(run, step)
            os.write(writes, f"saved {step}\n".encode())
            save_model(run / "best", network(step), words, {"step": step})


def test_all_reaches_the_disk_before_it_gets_its_name(
    tmp_path: Path, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    renamed: list[Path] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        if not Path(target).name.startswith("."):
            needed = [path.stat().st_ino for path in (source, *source.iterdir())]
            assert set(needed) <= set(synced), "a file was not synced"
            assert synced[-1] == source.stat().st_ino, "the folder comes after its files"
            renamed.append(target)
            synced.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    save_model(tmp_path / "best", network(), words)
    assert tmp_path.stat().st_ino in synced, "the name itself reaches the disk"
    for step in (1, 2, 3):
        _save(tmp_path, step)
        assert (tmp_path / "checkpoints").stat().st_ino in synced
    assert len(renamed) == 4


def test_an_interrupted_save_leaves_nothing_behind(tmp_path: Path, words: Tokenizer) -> None:
    save_model(tmp_path / "best", network(), words)
    before = contents(tmp_path)

    class Interrupts(dict[str, Any]):
        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path / "best", network(1), words, {"deep": Interrupts(a=1)})
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
