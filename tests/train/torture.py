"""Kills training at random moments, over and over, and sees that nothing is ever lost: `make torture`.

    python -m tests.train.torture [KILLS] [TERMS]

Every life of a run is the real command, `clearhead train RECIPE --out RUN --resume`, in a process forked from one that
has torch in memory already. SIGKILL comes at any moment, often inside a save (a draft folder is on disk); SIGTERM while
the run begins, learns or validates. After every death the newest checkpoint must be whole and no more than one interval
old, the next life must go on by itself, and the finished run must equal, to the bit, one that was left alone.
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
from clearhead.checkpoint import disk, load_model, newest_state
from clearhead.config.recipe import dump_recipe
from clearhead.train import loop, validate
from clearhead.train.run_log import read_log
from tests.train.tiny import distance, events, recipe, tensors

EVERY = 4  # steps between two checkpoints
SYNC = 0.003  # seconds that a file takes to reach the disk, about ten times in a save
LIFE = 1.5  # seconds after which a life is ended at the latest


@dataclass
class Campaign:
    """One recipe, its undisturbed run, and what happened so far."""

    folder: Path
    steps: int = 48
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    counts: Counter[str] = field(default_factory=Counter)
    number: int = 0

    def __post_init__(self) -> None:
        made = recipe(
            "llama",
            steps=self.steps,
            save_every=EVERY,
            validate_every=6,
            keep_checkpoints=3,
            average_checkpoints=2,
            eval_samples=1,
        )
        (self.folder / "recipe.yaml").write_text(dump_recipe(made))
        child, _ = self.start(self.whole)
        assert self.ended(child, wait=True) == 0, self.said

    @property
    def whole(self) -> Path:
        """The run that nobody disturbs."""
        return self.folder / "whole"

    @property
    def run(self) -> Path:
        """The run that is being disturbed now."""
        return self.folder / f"run-{self.number}"

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def start(self, out: Path) -> tuple[int, int]:
        """A life of a run: its process, and a pipe with `b` when it begins and `v` when it validates."""
        reads, writes = os.pipe()
        (self.folder / "said").write_text("")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(reads)
                sys.stderr = (self.folder / "said").open("w", buffering=1)
                os.dup2(sys.stderr.fileno(), 2)
                code = _command(["train", str(self.folder / "recipe.yaml"), "--out", str(out), "--resume"], writes)
            except BaseException as error:  # must not come back as a second parent
                os.write(2, f"{error!r}\n".encode())
            os._exit(code)
        os.close(writes)
        return child, reads

    def ended(self, child: int, wait: bool = False) -> int | None:
        """The exit code of a life that is over, negative for a signal."""
        process, status = os.waitpid(child, 0 if wait else os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if process else None

    def kill(self) -> None:
        """One life that ends by SIGKILL, unless the run is finished first; the run is checked after it."""
        child, pipe = self.start(self.run)
        code = self._wait_for_a_draft(child) if self.chance.random() < 0.6 else self._wait(child)
        if code is None:
            os.kill(child, signal.SIGKILL)
            code = self.ended(child, wait=True)
        os.close(pipe)
        if code == 0:
            self.finished()
            return
        assert code == -signal.SIGKILL, self.said
        self.counts["killed"] += 1
        self.counts["inside a save"] += bool(_drafts(self.run))
        self.check()

    def terminate(self) -> None:
        """One life that ends by SIGTERM: cleanly, with all it had learned."""
        existed = self.run.exists()
        child, pipe = self.start(self.run)
        moment = self.chance.choice(["begins", "learns", "validates"])
        for awaited in (b"b", b"v") if moment == "validates" else (b"b",):  # only now does it listen
            while os.read(pipe, 1) not in (awaited, b""):
                pass
        time.sleep(0 if moment == "begins" else self.chance.uniform(0, 0.005 if moment == "validates" else 0.3))
        code = self.ended(child)
        if code is None:
            os.kill(child, signal.SIGTERM)
            code = self.ended(child, wait=True)
        os.close(pipe)
        assert code == 0, self.said
        if "stopped " not in self.said:
            self.finished()
            return
        self.counts["terminated"] += 1
        self.counts[f"terminated while it {moment}"] += 1
        self.check()
        if "stopped before the first step" in self.said:
            assert "nothing was written" in self.said or existed, "no step was done"
            assert self.run.exists() == existed
            return
        assert events(self.run)[-1]["reason"] == "stopped"
        state, _ = newest_state(self.run)
        assert state is not None
        assert f"stopped at step {state.step:,}" in self.said
        load_model(self.run / "last")

    def check(self) -> None:
        """What is on disk after a death."""
        state, refused = newest_state(self.run)
        assert refused == [], "the newest checkpoint is whole"
        saved = 0 if state is None else state.step
        log = self.run / "log.jsonl"
        reached = max([0, *(line["step"] for line in read_log(log))]) if log.exists() else 0
        assert reached - saved <= EVERY, f"step {reached} was reached, but {saved} is the newest checkpoint"
        self.counts["most steps lost"] = max(self.counts["most steps lost"], reached - saved)
        for name in ("best", "last"):
            if (self.run / name).exists() or (self.run / f".{name}.old").exists():
                load_model(self.run / name)

    def finished(self) -> None:
        """Whether a run that came to its end is the undisturbed one; the next death is another run's."""
        assert _told(self.run) == _told(self.whole)
        assert distance(tensors(self.run), tensors(self.whole)) == 0
        for name in ("best", "last"):
            models = [load_model(out / name).network.state_dict() for out in (self.run, self.whole)]
            assert distance(models[0], models[1]) == 0, name
        assert not _drafts(self.run)
        self.counts["finished"] += 1
        shutil.rmtree(self.run)
        self.number += 1

    def finish(self) -> None:
        """Let the run that is being disturbed come to its end."""
        child, pipe = self.start(self.run)
        assert self.ended(child, wait=True) == 0, self.said
        os.close(pipe)
        self.finished()

    def _wait(self, child: int) -> int | None:
        time.sleep(self.chance.uniform(0, LIFE))
        return self.ended(child)

    def _wait_for_a_draft(self, child: int) -> int | None:
        """Until the process is inside a save: not always the first one, not always at its beginning."""
        passing = self.chance.randrange(4)
        seen: set[str] = set()
        while len(seen) <= passing:
            if (code := self.ended(child)) is not None:
                return code
            seen |= _drafts(self.run)
        time.sleep(self.chance.uniform(0, 5 * SYNC))
        return self.ended(child)


def _command(arguments: list[str], pipe: int) -> int:
    """The command line in this process, which tells the pipe what it does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not survive the fork
    made, losses = loop.Run, validate.losses

    def begins(*given: Any) -> loop.Run:
        os.write(pipe, b"b")
        return made(*given)

    def validates(*given: Any) -> dict[str, float]:
        os.write(pipe, b"v")
        return losses(*given)

    def slowly(path: Path) -> None:
        """As on a slow disk, so that a save lasts long enough to be hit."""
        time.sleep(SYNC)
        sync(path)

    sync = disk._sync
    loop.Run, validate.losses, disk._sync = begins, validates, slowly  # type: ignore[misc, assignment]
    sys.argv = ["clearhead", *arguments]
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _drafts(run: Path) -> set[str]:
    """Folders that are being written."""
    found: set[str] = set()
    for place in (run, run / "checkpoints"):
        try:
            found |= {entry.name for entry in os.scandir(place) if ".tmp-" in entry.name}
        except FileNotFoundError:
            continue
    return found


def _told(run: Path) -> list[dict[str, Any]]:
    return [event for event in events(run) if event["kind"] != "start"]


def main(kills: int = 200, terms: int = 50) -> None:
    """The long campaign, with its figures."""
    with TemporaryDirectory() as folder:
        os.environ.setdefault("CLEARHEAD_CACHE", f"{folder}/cache")
        campaign = Campaign(Path(folder))
        began = time.perf_counter()
        while campaign.counts["killed"] < kills:
            campaign.kill()
        campaign.finish()
        while campaign.counts["terminated"] < terms:
            campaign.terminate()
        campaign.finish()
        for name, count in campaign.counts.items():
            print(f"{count:5}  {name}")
        print(f"no checkpoint was lost, no run differed; {time.perf_counter() - began:.0f} s")
        assert campaign.counts["inside a save"] >= 0.3 * kills, "too few kills were inside a save; run it again"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
