"""Elastic training: kill workers of 2 nodes × 2 processes at random; torchrun restarts them (`make torture`).

    python -m tests.train.elastic [KILLS] [SEED]

Two torchrun agents on this machine, with c10d rendezvous on loopback, run `clearhead train RECIPE --out RUN --resume`.
A worker is killed while starting, while training or inside a save; both agents then restart all workers, which resume.
Every finished run must equal an undisturbed one of the same four processes to 1e-9 in fp64: DDP orders its buckets
anew after the first step of every start, and with them the sums over more than two processes.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from clearhead.config.recipe import dump_recipe
from clearhead.errors import UserError
from clearhead.train.run_log import read_log
from tests.train.tiny import distance, events, losses, recipe, tensors
from tests.train.torture import temporary_folders

STEPS, SAVE_EVERY = 60, 3
TIMEOUT = 600.0  # seconds without progress


class Elastic:
    """A recipe, its undisturbed run, and counts of what happened."""

    def __init__(self, folder: Path, seed: int = 0):
        self.folder, self.random, self.counts = folder, random.Random(seed), Counter[str]()
        self.distance = 0.0  # the largest from the undisturbed run
        made = recipe(
            "gpt", steps=STEPS, save_every=SAVE_EVERY, validate_every=20, eval_samples=1, log_every=1, precision="fp64"
        )
        (folder / "recipe.yaml").write_text(dump_recipe(made))
        self.train(folder / "undisturbed", kills=0)

    def train(self, out: Path, kills: int) -> None:
        """Train to the end, killing up to this number of workers, and compare with the undisturbed run."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with (self.folder / "output").open("w") as output:
            agents = [self._agent(out, port, output) for _ in range(2)]
            try:
                # Not near the end: torchrun restarts no node when another has already ended.
                while kills and _reached(out) < STEPS - 15 and any(agent.poll() is None for agent in agents):
                    kills -= self._kill(agents, out)
                codes = [agent.wait(TIMEOUT) for agent in agents]
            finally:
                for agent in agents:
                    agent.kill()
        assert codes == [0, 0], (self.folder / "output").read_text()[-5000:]
        assert events(out)[-1]["reason"] == "finished"
        steps = [event["step"] for event in events(out, "step")]
        assert steps == list(range(1, STEPS + 1)), "every step is logged once"
        undisturbed = self.folder / "undisturbed"
        assert all(abs(a - b) < 1e-9 for a, b in zip(losses(out), losses(undisturbed), strict=True))
        self.distance = max(self.distance, distance(tensors(out), tensors(undisturbed)))
        assert self.distance < 1e-9, self.distance
        self.counts["runs equal to the undisturbed one"] += 1

    def _agent(self, out: Path, port: int, output: object) -> subprocess.Popen[bytes]:
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1000", "--monitor-interval", "0.1"]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", out.name]
        command = ["-m", "clearhead", "train", str(self.folder / "recipe.yaml"), "--out", str(out), "--resume"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
        # Else all attempts share one store, and workers connect to addresses of the previous attempt (torch 2.13).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        launcher = [sys.executable, "-m", "torch.distributed.run", *options, "--local-addr", "localhost"]
        return subprocess.Popen([*launcher, *command], env=environment, stdout=output, stderr=output)  # type: ignore[call-overload]

    def _kill(self, agents: list[subprocess.Popen[bytes]], out: Path) -> int:
        """Kill one worker: while starting in one of five cases, else some steps later; the number killed."""
        starting, reached = self.random.random() < 0.2, _reached(out)
        wanted = reached + self.random.randint(1, 3 * SAVE_EVERY)
        deadline = time.monotonic() + (self.random.uniform(1, 10) if starting else TIMEOUT)
        while _reached(out) < wanted and time.monotonic() < deadline:
            if all(agent.poll() is not None for agent in agents):
                return 0
            time.sleep(0.002)
        workers = [pid for agent in agents for pid in _children(agent.pid)]
        if not workers:
            return 0
        os.kill(self.random.choice(workers), signal.SIGKILL)
        self.counts["workers killed"] += 1
        self.counts["workers killed while starting"] += _reached(out) == reached
        self.counts["workers killed inside a save"] += bool(temporary_folders(out))
        return 1


def _reached(out: Path) -> int:
    """The last step in the log."""
    try:
        return max((line.get("step", 0) for line in read_log(out / "log.jsonl")), default=0)
    except UserError:  # not there yet, or being replaced
        return 0


def _children(agent: int) -> list[int]:
    """The workers of an agent."""
    children = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == agent and b"clearhead" in (entry / "cmdline").read_bytes():
                children.append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue
    return children


def main(kills: int = 50, seed: int = 0) -> None:
    """Kill workers of one run after another and print the counts."""
    with TemporaryDirectory() as folder:
        os.environ.setdefault("CLEARHEAD_CACHE", f"{folder}/cache")
        start = time.perf_counter()
        elastic, number = Elastic(Path(folder), seed), 0
        while (left := kills - elastic.counts["workers killed"]) > 0:
            number += 1
            elastic.train(Path(folder) / f"run-{number}", left)
            print(dict(elastic.counts), f"{time.perf_counter() - start:.0f} s", flush=True)
        for name, count in elastic.counts.items():
            print(f"{count:5}  {name}")
        print(f"largest difference of a weight: {elastic.distance:.1e}; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
