"""Crash test: kill training at random moments and check that nothing is ever lost (`make torture`).

    python -m tests.train.torture [KILLS] [TERMS]

Every attempt is the real command, `clearhead train RECIPE --out RUN --resume`, in a process forked from one that has
imported torch. SIGKILL comes at any moment, often during a save (a temporary folder is on disk); SIGTERM, Ctrl-C,
SIGHUP or SIGUSR1 during setup, training or validation. After each of them the newest checkpoint must be intact and at
most one interval old, the next attempt must resume by itself, and the finished run must be bit-identical to an
uninterrupted one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from clearhead import cli
from clearhead.checkpoint import disk, load_model, newest_checkpoint
from clearhead.config.recipe import dump_recipe
from clearhead.train import loop, validate
from clearhead.train.run_log import read_log
from clearhead.train.signals import SIGNALS
from tests.train.tiny import distance, events, recipe, tensors

SAVE_EVERY = 4  # steps between checkpoints
SYNC_SECONDS = 0.003  # of a simulated fsync; a save does about ten
MAX_SECONDS = 1.5  # of an attempt before SIGKILL


@dataclass
class Campaign:
    """One recipe, its uninterrupted run, and counts of what happened."""

    folder: Path
    steps: int = 48
    random: random.Random = field(default_factory=lambda: random.Random(0))
    counts: Counter[str] = field(default_factory=Counter)
    number: int = 0

    def __post_init__(self) -> None:
        made = recipe(
            "llama",
            steps=self.steps,
            save_every=SAVE_EVERY,
            validate_every=6,
            keep_checkpoints=3,
            average_checkpoints=2,
            eval_samples=1,
        )
        (self.folder / "recipe.yaml").write_text(dump_recipe(made))
        child, _ = self.start(self.uninterrupted)
        assert self.exit_code(child, wait=True) == 0, self.output

    @property
    def uninterrupted(self) -> Path:
        """The folder of the uninterrupted run."""
        return self.folder / "uninterrupted"

    @property
    def run(self) -> Path:
        """The folder of the run that is being interrupted."""
        return self.folder / f"run-{self.number}"

    @property
    def output(self) -> str:
        """The stderr of the last attempt."""
        return (self.folder / "stderr").read_text()

    def start(self, out: Path) -> tuple[int, int]:
        """Start an attempt: its process, and a pipe that receives `b` at setup and `v` at validation."""
        reads, writes = os.pipe()
        (self.folder / "stderr").write_text("")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(reads)
                sys.stderr = (self.folder / "stderr").open("w", buffering=1)
                os.dup2(sys.stderr.fileno(), 2)
                code = run_command(["train", str(self.folder / "recipe.yaml"), "--out", str(out), "--resume"], writes)
            except BaseException as error:  # must not return into the parent's code
                os.write(2, f"{error!r}\n".encode())
            os._exit(code)
        os.close(writes)
        return child, reads

    def exit_code(self, child: int, wait: bool = False) -> int | None:
        """The exit code of an attempt, negative for a signal; None while it runs."""
        process, status = os.waitpid(child, 0 if wait else os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if process else None

    def kill(self) -> None:
        """One attempt ended by SIGKILL, unless the run finishes first; then check the run."""
        child, pipe = self.start(self.run)
        code = self._wait_for_save(child) if self.random.random() < 0.6 else self._wait(child)
        if code is None:
            os.kill(child, signal.SIGKILL)
            code = self.exit_code(child, wait=True)
        os.close(pipe)
        if code == 0:
            self.check_finished()
            return
        assert code == -signal.SIGKILL, self.output
        self.counts["killed"] += 1
        self.counts["inside a save"] += bool(temporary_folders(self.run))
        self.check()

    def terminate(self) -> None:
        """One attempt ended by a signal that stops: it must save and exit with 128 and the signal's number."""
        existed = self.run.exists()
        child, pipe = self.start(self.run)
        phase = self.random.choice(["setup", "training", "validation"])
        for awaited in (b"b", b"v") if phase == "validation" else (b"b",):  # signal handlers are installed now
            while os.read(pipe, 1) not in (awaited, b""):
                pass
        time.sleep(0 if phase == "setup" else self.random.uniform(0, 0.005 if phase == "validation" else 0.3))
        code, number = self.exit_code(child), self.random.choice(SIGNALS)
        if code is None:
            os.kill(child, number)
            code = self.exit_code(child, wait=True)
        os.close(pipe)
        if code == 0:
            assert "stopped " not in self.output
            self.check_finished()
            return
        assert code == 128 + number, self.output
        self.counts["terminated"] += 1
        self.counts[f"terminated during {phase}"] += 1
        self.check()
        if "stopped before the first step" in self.output:
            assert "nothing was written" in self.output or existed, "no step was done"
            assert self.run.exists() == existed
            return
        assert events(self.run)[-1]["reason"] == "stopped"
        state, _ = newest_checkpoint(self.run)
        assert state is not None
        assert f"stopped at step {state.step:,}" in self.output
        load_model(self.run / "last")

    def check(self) -> None:
        """Check what is on disk after an interruption."""
        state, damaged = newest_checkpoint(self.run)
        assert damaged == [], "the newest checkpoint is intact"
        saved = 0 if state is None else state.step
        log = self.run / "log.jsonl"
        reached = max([0, *(line["step"] for line in read_log(log))]) if log.exists() else 0
        assert reached - saved <= SAVE_EVERY, f"step {reached} was reached, but {saved} is the newest checkpoint"
        self.counts["most steps lost"] = max(self.counts["most steps lost"], reached - saved)
        for name in ("best", "last"):
            if (self.run / name).exists() or (self.run / f".{name}.old").exists():
                load_model(self.run / name)

    def check_finished(self) -> None:
        """Compare a finished run with the uninterrupted one; the next attempt starts another run."""
        assert _log(self.run) == _log(self.uninterrupted)
        assert distance(tensors(self.run), tensors(self.uninterrupted)) == 0
        for name in ("best", "last"):
            models = [load_model(out / name).network.state_dict() for out in (self.run, self.uninterrupted)]
            assert distance(models[0], models[1]) == 0, name
        assert not temporary_folders(self.run)
        self.counts["finished"] += 1
        shutil.rmtree(self.run)
        self.number += 1

    def finish(self) -> None:
        """Let the interrupted run finish."""
        child, pipe = self.start(self.run)
        assert self.exit_code(child, wait=True) == 0, self.output
        os.close(pipe)
        self.check_finished()

    def _wait(self, child: int) -> int | None:
        time.sleep(self.random.uniform(0, MAX_SECONDS))
        return self.exit_code(child)

    def _wait_for_save(self, child: int) -> int | None:
        """Wait until the process is inside a save: not always the first, not always at its start."""
        skipped = self.random.randrange(4)
        seen: set[str] = set()
        while len(seen) <= skipped:
            if (code := self.exit_code(child)) is not None:
                return code
            seen |= temporary_folders(self.run)
        time.sleep(self.random.uniform(0, 5 * SYNC_SECONDS))
        return self.exit_code(child)


def run_command(arguments: list[str], pipe: int) -> int:
    """Run the command line in this process and report its phases to the pipe."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive the fork
    setup, evaluate_losses, sync = loop.setup, validate.evaluate_losses, disk._sync

    def reported_setup(*args: Any) -> loop.RunState:
        os.write(pipe, b"b")
        return setup(*args)

    def reported_validation(*args: Any) -> dict[str, float]:
        os.write(pipe, b"v")
        return evaluate_losses(*args)

    def slow_sync(path: Path) -> None:
        """Simulate a slow disk, so that a save lasts long enough to be interrupted."""
        time.sleep(SYNC_SECONDS)
        sync(path)

    loop.setup, validate.evaluate_losses, disk._sync = reported_setup, reported_validation, slow_sync
    sys.argv = ["clearhead", *arguments]
    try:
        cli.main(ends_process=True)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def temporary_folders(run: Path) -> set[str]:
    """Folders that are being written."""
    names: set[str] = set()
    for folder in (run, run / "checkpoints"):
        try:
            names |= {entry.name for entry in os.scandir(folder) if ".tmp-" in entry.name}
        except FileNotFoundError:
            continue
    return names


def _log(run: Path) -> list[dict[str, Any]]:
    return [event for event in events(run) if event["kind"] != "start"]


def main(kills: int = 200, terms: int = 50) -> None:
    """Run the long campaign and print its counts."""
    with TemporaryDirectory() as folder:
        os.environ.setdefault("CLEARHEAD_CACHE", f"{folder}/cache")
        campaign = Campaign(Path(folder))
        start = time.perf_counter()
        while campaign.counts["killed"] < kills:
            campaign.kill()
        campaign.finish()
        while campaign.counts["terminated"] < terms:
            campaign.terminate()
        campaign.finish()
        for name, count in campaign.counts.items():
            print(f"{count:5}  {name}")
        print(f"no checkpoint was lost, all runs are equal; {time.perf_counter() - start:.0f} s")
        assert campaign.counts["inside a save"] >= 0.3 * kills, "too few kills were inside a save; run it again"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
