"""Training beside a busy process: tokens per second by how long libgomp's threads spin before they sleep.

    python -m bench.busy                          mini-en-de of level 1, quiet and beside one busy process
    python -m bench.busy --spins 0 1000 --rounds 5

Each run is a process of its own, since libgomp reads GOMP_SPINCOUNT when it is loaded; the runs take turns. 300000 is
libgomp's default. The last column is the median share of the cores that other processes had: quiet figures mean
something only if it is near zero.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from clearhead.train.run_log import read_log

DATA = ("data.train.level=1", "data.train.count=5000", "data.valid=[]", "train.metric=loss")
UNUSED_STEPS = 4  # at the start


def main() -> None:
    """Parse the options, take turns, print the medians."""
    parser = argparse.ArgumentParser(prog="python -m bench.busy", description=__doc__.split("\n")[0])
    parser.add_argument("--spins", nargs="*", default=["300000", "0", "1000", "10000", "100000"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=30, help="Seconds after which a run is stopped.")
    options = parser.parse_args()
    measured: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for condition in ("quiet", "busy"):
            for spins in options.spins:
                measured[condition, spins].append(measure(condition, spins, options))
    print(f"{'':<6} {'spins':>8} {'tokens/s':>9} {'others':>7}")
    for (condition, spins), values in measured.items():
        speed, others = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{condition:<6} {spins:>8} {speed:>9,.0f} {others:>7.0%}")


def measure(condition: str, spins: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return tokens per second of one run, and the share of all cores that other processes had meanwhile."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "GOMP_"))}
    environment["OMP_NUM_THREADS"] = str(options.threads)
    environment["GOMP_SPINCOUNT"] = spins
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if condition == "busy" else None
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    busy_before = busy_seconds()
    try:
        with tempfile.TemporaryDirectory() as folder:
            speed = train(Path(folder) / "run", environment, options)
    finally:
        if other is not None:
            other.kill()
    busy, seconds = busy_seconds() - busy_before, time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return speed, max(0.0, busy - own) / seconds / (os.cpu_count() or 1)


def train(out: Path, environment: dict[str, str], options: argparse.Namespace) -> float:
    """Train for some steps or until the time is up; return the harmonic mean of the logged tokens per second."""
    settings = (*DATA, f"train.steps={options.steps}", "train.warmup=1", "train.log_every=1", f"--out={out}")
    command = [sys.executable, "-m", "clearhead", "train", "mini-en-de", *settings]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        child.wait(options.limit)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    log = out / "log.jsonl"
    steps = [line["tokens_per_second"] for line in read_log(log) if line["kind"] == "step"] if log.exists() else []
    return statistics.harmonic_mean(steps[UNUSED_STEPS:]) if len(steps) > UNUSED_STEPS else 0.0


def busy_seconds() -> float:
    """Return the seconds that all cores together have worked, from /proc/stat."""
    ticks = [int(value) for value in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
