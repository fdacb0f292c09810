"""Processes killed while saving: at every moment, the newest complete checkpoint or model is undamaged.

CLEARHEAD_KILLS=200 sets the number of kills of the SIGKILL test.
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

from clearhead.checkpoint import load_model, newest_checkpoint, read_checkpoint, run_lock, save_model, write_checkpoint
from clearhead.errors import UserError
from clearhead.text import Tokenizer
from tests.checkpoint.small_models import contents, equal, network, tokenizer

KILLS = int(os.environ.get("CLEARHEAD_KILLS", "10"))
OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate"}


@pytest.fixture(scope="module")
def text_tokenizer() -> Tokenizer:
    return tokenizer()


def in_child(function: Callable[[], object]) -> int:
    """Run a function in a forked process that exits without cleanup; return the exit code."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException as error:  # no exception may continue as a second pytest
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dies_at(number: int, function: Callable[[], object]) -> bool:
    """Whether a process dies if it is killed before its file operation of this number."""

    def run_until_death() -> None:
        remaining = [number]

        def hook(event: str, _: Any) -> None:
            if event in OPERATIONS:
                remaining[0] -= 1
                if remaining[0] == 0:
                    os._exit(9)

        sys.addaudithook(hook)
        function()

    code = in_child(run_until_death)
    assert code in (0, 9)
    return code == 9


def test_a_killed_save_leaves_the_old_or_the_new_model(tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    folder = tmp_path / "run" / "best"
    loaded_seeds, number, dies = [], 0, True
    while dies:
        number += 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        save_model(folder, network(0), text_tokenizer, {"seed": 0})
        (folder / "notes.txt").write_text("mine")
        dies = dies_at(number, lambda: save_model(folder, network(1), text_tokenizer, {"seed": 1}))
        loaded = load_model(folder)
        seed = loaded.extra["seed"]
        loaded_seeds.append(seed)
        assert equal(loaded.network.state_dict(), network(seed).state_dict())
        save_model(folder, network(2), text_tokenizer, {"seed": 2})  # the next save cleans up
        assert load_model(folder).extra == {"seed": 2}
        assert [path.name for path in folder.parent.iterdir()] == ["best"]
        assert (folder / "notes.txt").read_text() == "mine"
    assert len(loaded_seeds) > 20
    assert loaded_seeds == sorted(loaded_seeds), "the new model is loaded from one operation on"
    assert set(loaded_seeds) == {0, 1}


def test_a_killed_first_save_leaves_a_complete_model_or_none(tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    number, dies = 0, True
    while dies:
        number += 1
        folder = tmp_path / str(number) / "model"
        dies = dies_at(number, lambda: save_model(folder, network(), text_tokenizer))  # noqa: B023
        if folder.exists() or not dies:
            load_model(folder)
        else:
            with pytest.raises(UserError, match="does not exist"):
                load_model(folder)
    assert number > 10


@pytest.mark.parametrize("last", [2, 3])
def test_a_killed_save_leaves_an_undamaged_newest_checkpoint(last: int, tmp_path: Path) -> None:
    """Save step 3 after 1 and 2 or, as after a resume, over an earlier 3; `keep` then deletes step 1."""
    run, number, dies, loaded_steps = tmp_path / "run", 0, True, []
    while dies:
        number += 1
        shutil.rmtree(run, ignore_errors=True)
        for step in range(1, last + 1):
            save_step(run, step)
        dies = dies_at(number, lambda: save_step(run, 3))
        state, errors = newest_checkpoint(run)
        assert state is not None
        assert errors == []
        assert state.step in (2, 3)
        assert state.weights()["weight"][0] == state.step
        loaded_steps.append(state.step)
        for folder in (run / "checkpoints").glob("step-*"):
            read_checkpoint(folder)  # a partly deleted one no longer has its name
        with run_lock(run):
            names = {path.name for path in (run / "checkpoints").iterdir()}
        assert {f"step-0000000{loaded_steps[-1]}", "step-00000002"} <= names <= {f"step-0000000{n}" for n in (1, 2, 3)}
    assert len(loaded_steps) > 20
    assert loaded_steps[-1] == 3


def save_step(run: Path, step: int) -> None:
    write_checkpoint(
        run, step, {"weight": torch.full((5000,), step)}, {"moment": torch.zeros(9000)}, {"step": step}, keep=2
    )


def test_killed_training_resumes_from_its_last_checkpoint(tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    """SIGKILL a process that only saves at random moments; the next process continues from its last step."""
    during_save = saved = 0
    rng = random.Random(0)
    for _ in range(KILLS):
        child, output = start_trainer(tmp_path, text_tokenizer)
        lines = [output.readline() for _ in range(1 + 2 * rng.randrange(3))]  # until one of its first saves begins
        time.sleep(rng.choice([0, rng.uniform(0, 0.05)]))  # 0: during the save that has just begun
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with output:
            lines += output.readlines()
        assert all(line.startswith(("begin", "saved")) for line in lines), lines
        during_save += lines[-1].startswith("begin")
        saved = max([saved, *(int(line.split()[1]) for line in lines if line.startswith("saved"))])
        state, errors = newest_checkpoint(tmp_path)
        assert errors == []
        newest = 0 if state is None else state.step
        assert saved <= newest <= saved + 1, "every saved step is there; the one being saved may be"
        saved = newest
        if state is not None:
            assert torch.equal(state.weights()["weight"], torch.full((5000,), newest))
        if (tmp_path / "best").exists() or (tmp_path / ".best.old").exists():
            best = load_model(tmp_path / "best")
            assert best.extra["step"] <= newest
            assert equal(best.network.state_dict(), network(best.extra["step"]).state_dict())
    assert saved > KILLS / 4, "training made progress"
    assert during_save >= KILLS / 10, "some kills were during a save"
    with run_lock(tmp_path):
        folders = {path.parent.name for path in tmp_path.rglob("*.safetensors")}
    assert len(folders) <= 3, "only two checkpoints and the best model are left"
    print(f"{KILLS} kills, {during_save} during a save, {saved} checkpoints saved")


def start_trainer(run: Path, text_tokenizer: Tokenizer) -> tuple[int, TextIO]:
    """Start a process that saves repeatedly; return its pid and output."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_repeatedly(run, text_tokenizer, write_end)
        except BaseException as error:
            os.write(write_end, f"{error!r}\n".encode())
        os._exit(1)
    os.close(write_end)
    return child, os.fdopen(read_end, encoding="utf-8")


def save_repeatedly(run: Path, text_tokenizer: Tokenizer, write_end: int) -> None:
    with run_lock(run):
        state, _ = newest_checkpoint(run)
        step = 0 if state is None else state.step
        while True:
            step += 1
            os.write(write_end, f"begin {step}\n".encode())
            save_step(run, step)
            os.write(write_end, f"saved {step}\n".encode())
            save_model(run / "best", network(step), text_tokenizer, {"step": step})


def test_everything_is_synced_before_the_rename(
    tmp_path: Path, text_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    renamed: list[Path] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        if not Path(target).name.startswith("."):
            inodes = [path.stat().st_ino for path in (source, *source.iterdir())]
            assert set(inodes) <= set(synced), "a file was not synced"
            assert synced[-1] == source.stat().st_ino, "a folder is synced after its files"
            renamed.append(target)
            synced.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    save_model(tmp_path / "best", network(), text_tokenizer)
    assert tmp_path.stat().st_ino in synced, "the parent folder is synced"
    for step in (1, 2, 3):
        save_step(tmp_path, step)
        assert (tmp_path / "checkpoints").stat().st_ino in synced
    assert len(renamed) == 4


def test_an_interrupted_save_leaves_nothing_behind(tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    save_model(tmp_path / "best", network(), text_tokenizer)
    before = contents(tmp_path)

    class Interrupts(dict[str, Any]):
        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path / "best", network(1), text_tokenizer, {"deep": Interrupts(a=1)})
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
