"""Faults of stdout and stderr in training: every run finishes, or saves and says so by its exit code (`make torture`).

    python -m tests.train.output_faults [COUNT] [SEED]

Every attempt is the real command in a process forked from one that has imported torch. Its stderr (often stdout, too)
is closed, a full device, a pipe whose reader leaves, is slow or stops reading, or a terminal that hangs up. A run that
exits with 0 must equal an undisturbed one; a hang-up must exit with 129, have saved its last step, and resume.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import pty
import random
import select
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from clearhead.checkpoint import newest_checkpoint
from clearhead.config.recipe import dump_recipe
from clearhead.train.run_log import read_log
from tests.train.tiny import distance, events, recipe, tensors
from tests.train.torture import run_command

STEPS = 24
TIMEOUT = 180.0  # seconds; an undisturbed run takes one on an idle machine
Watcher = Callable[[int, random.Random], None]  # what happens at the other end of stderr; called until the process ends


class Faults:
    """A recipe, its undisturbed run, and attempts with a fault each."""

    def __init__(self, folder: Path, seed: int = 0):
        self.folder, self.random, self.counts = folder, random.Random(seed), Counter[str]()
        made = recipe("gpt", steps=STEPS, validate_every=6, eval_samples=1, log_every=1)
        (folder / "recipe.yaml").write_text(dump_recipe(made))
        self.run, self.undisturbed = folder / "run", folder / "undisturbed"
        assert self._wait(self._start(self.undisturbed, os.open(os.devnull, os.O_WRONLY)), None) == 0

    def attempt(self, kind: str) -> None:
        """Train with a fault and check what became of the run."""
        shutil.rmtree(self.run, ignore_errors=True)
        child, other_end = self._disturbed(kind)
        code = self._wait(child, other_end, leave_after=self.random.randrange(STEPS), kind=kind)
        finished = self.run.exists() and events(self.run)[-1].get("reason") == "finished"
        if kind == "hang-up" and code == -signal.SIGHUP and (finished or not self.run.exists()):
            self.counts[f"{kind}: before or after training"] += 1
        elif kind == "hang-up" and code == 128 + signal.SIGHUP:
            self.counts[f"{kind}: saved"] += 1
            self._check_saved()
        else:
            assert (code, finished) == (0, True), f"{kind}: exit code {code}\n{self._error()}"
            self.counts[f"{kind}: finished"] += 1
            assert events(self.run) == events(self.undisturbed)
        if not finished:
            assert self._wait(self._start(self.run, os.open(os.devnull, os.O_WRONLY)), None) == 0, self._error()
        assert events(self.run)[-1]["reason"] == "finished"
        assert distance(tensors(self.run), tensors(self.undisturbed)) == 0

    def _check_saved(self) -> None:
        """Check that every logged step is in a checkpoint."""
        if self.run.exists():
            state, damaged = newest_checkpoint(self.run)
            assert state is not None
            assert (state.step, damaged) == (max(line.get("step", 0) for line in read_log(self.run / "log.jsonl")), [])

    def _error(self) -> str:
        """What the last attempt wrote when it failed: an exception, or where it was."""
        return (self.folder / "error").read_text()

    def _disturbed(self, kind: str) -> tuple[int, int | None]:
        """Start a run with a fault; return the process, and the other end of its stderr."""
        if kind in ("hang-up", "hang-up under nohup", "stopped terminal"):
            started, starts = os.pipe()
            child, terminal = pty.fork()
            if child == 0:
                signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in kind else signal.SIG_DFL)
                os.close(starts)
                self._train(self.run, full="stopped" in kind)
            os.close(starts)
            os.read(started, 1)  # until the process has its terminal
            os.close(started)
            return child, terminal
        if kind == "full device":
            return self._start(self.run, os.open("/dev/full", os.O_WRONLY), self.random.random() < 0.5), None
        if kind == "closed":
            return self._start(self.run, None, self.random.random() < 0.5), None
        reads, writes = os.pipe()
        if "slow" in kind or "stopped" in kind:
            fcntl.fcntl(reads, 1031, 4096)  # F_SETPIPE_SZ
        return self._start(self.run, writes, self.random.random() < 0.5, reads, "stopped" in kind), reads

    def _start(
        self, out: Path, stderr: int | None, with_stdout: bool = False, reads: int | None = None, full: bool = False
    ) -> int:
        """Start a run with this stderr, as stdout too if `with_stdout`; None: closed."""
        child = os.fork()
        if child == 0:
            if reads is not None:
                os.close(reads)
            for descriptor in (1, 2) if with_stdout else (2,):
                if stderr is None:
                    os.close(descriptor)
                else:
                    os.dup2(stderr, descriptor)
            self._train(out, (1, 2)[not with_stdout :] if stderr is None else (), full)
        if stderr is not None:
            os.close(stderr)
        return child

    def _train(self, out: Path, closed: tuple[int, ...] = (), full: bool = False) -> None:
        """Run the command in this forked process, which it ends; `full`: nothing more fits into the pipe of stderr."""
        code = 1
        try:
            faulthandler.dump_traceback_later(TIMEOUT - 10, file=(self.folder / "error").open("w"))
            if full:
                os.set_blocking(2, False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        os.write(2, b"x")
                os.set_blocking(2, True)
            streams = {
                number: None if number in closed else os.fdopen(number, "w", 1, closefd=False) for number in (1, 2)
            }
            sys.stdout, sys.stderr = streams[1], streams[2]  # type: ignore[assignment]
            arguments = ["train", str(self.folder / "recipe.yaml"), "--out", str(out), "--resume"]
            code = run_command(arguments, os.open(os.devnull, os.O_WRONLY))
        except BaseException as error:  # must not return into the parent's code
            (self.folder / "error").write_text("".join(traceback.format_exception(error)))
        os._exit(code)

    def _wait(self, child: int, other_end: int | None, leave_after: int = 0, kind: str = "") -> int:
        """Read stderr as the kind of fault wants until the process has ended; return the exit code."""
        deadline, lines = time.monotonic() + TIMEOUT, 0
        while True:
            process, status = os.waitpid(child, os.WNOHANG)
            if process or time.monotonic() > deadline:
                break
            if other_end is None or "stopped" in kind:
                time.sleep(0.005)
            elif "slow" in kind:
                time.sleep(0.05)
                if select.select([other_end], [], [], 0)[0]:
                    os.read(other_end, 40)
            elif lines >= leave_after:  # the reader leaves, or the terminal hangs up
                os.close(other_end)
                other_end = None
            elif select.select([other_end], [], [], 0.005)[0]:
                try:
                    lines += os.read(other_end, 100).count(b"\n" if "hang-up" not in kind else b"/")
                except OSError:  # the process has closed the terminal
                    leave_after = 0
        if other_end is not None:
            os.close(other_end)
        if not process:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"{kind}: still running after {TIMEOUT:.0f} s\n{self._error()}")
        return os.waitstatus_to_exitcode(status)


KINDS = ("closed", "full device", "reader leaves", "slow reader", "stopped reader")
KINDS += ("hang-up", "hang-up under nohup", "stopped terminal")


def main(count: int = 200, seed: int = 0) -> None:
    """Try faults of every kind in turn and print what became of the runs."""
    with TemporaryDirectory() as folder:
        os.environ.setdefault("CLEARHEAD_CACHE", f"{folder}/cache")
        faults, start = Faults(Path(folder), seed), time.perf_counter()
        for number in range(count):
            faults.attempt(KINDS[number % len(KINDS)])
            if number % 25 == 24:
                print(f"{number + 1} of {count}", flush=True)
        for name, times in sorted(faults.counts.items()):
            print(f"{times:5}  {name}")
        print(f"{sum(faults.counts.values())} of {count} finished or saved; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
