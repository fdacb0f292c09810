"""The program of each process in the tests of distributed training: the runs of a JSON list, one after another.

RANK=0 WORLD_SIZE=2 … python processes.py JOBS.json     [{"recipe": {…}, "out": "…", "port": "…"}, …]
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from clearhead.config.recipe import Recipe
from clearhead.train.loop import train


def main(jobs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    for job in jobs:
        rank = int(os.environ["RANK"])
        os.environ["MASTER_PORT"] = job["port"]

        def stop(event: dict[str, Any], job: dict[str, Any] = job) -> None:
            """Signal one process only; all of them have to stop."""
            if event["kind"] == "step" and event["step"] == job.get("stop"):
                signal.raise_signal(signal.SIGTERM)

        summary = train(Recipe.build(job["recipe"]), Path(job["out"]), resume=True, on_event=stop)
        Path(f"{job['out']}-rank-{rank}.json").write_text(json.dumps([summary.step, summary.best, summary.stopped]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
