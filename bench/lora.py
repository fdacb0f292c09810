"""LoRA against full fine-tuning: score, training time and peak memory, each run in a process of its own.

python -m bench.lora sst2 trec                          the recipes' own model, MiniLM
python -m bench.lora sst2 --model smollm2 --rank 16 --device cuda
python -m bench.lora trec --steps 20                    a short trial
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.timing import machine
from clearhead.config.recipe import load_recipe
from clearhead.evaluate.model import evaluate
from clearhead.ops.device import choose_device
from clearhead.predict import load
from clearhead.train.loop import train

LR_FACTOR = 10  # LoRA trains with a higher learning rate than full fine-tuning


def main() -> None:
    """Parse the options, run every recipe both ways, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.lora", description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--model", help="a model folder, run folder or name; default: the recipe's")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, help="a short trial")
    parser.add_argument("--one", choices=("full", "lora"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options)))
        return
    print(f"{machine(choose_device(options.device))}\n")
    print("| recipe | metric | full | LoRA | difference | seconds | LoRA | memory, MiB | LoRA | trained | LoRA |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for name in options.recipes:
        arguments = [name, "--rank", str(options.rank), "--device", options.device]
        arguments += ["--model", options.model] if options.model else []
        arguments += ["--steps", str(options.steps)] if options.steps else []
        full, lora = (measured([*arguments, "--one", kind]) for kind in ("full", "lora"))
        cells = [name, str(full["metric"]), *(f"{100 * each['score']:.2f}" for each in (full, lora))]
        cells += [f"{100 * (lora['score'] - full['score']):+.2f}"]
        cells += [f"{each[key]:,.0f}" for key in ("seconds", "memory", "trained") for each in (full, lora)]
        print(f"| {' | '.join(cells)} |", flush=True)


def measured(arguments: list[str]) -> dict[str, float]:
    """Run one side in another process and return its last line."""
    command = [sys.executable, "-m", "bench.lora", *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def run(options: argparse.Namespace) -> dict[str, float | str]:
    """Train and evaluate one recipe one way."""
    device = choose_device(options.device)
    settings = [f"train.device={device}", *([f"model.init_from={options.model}"] if options.model else [])]
    if options.steps:
        steps, every = options.steps, max(1, options.steps // 2)
        settings += [f"train.steps={steps}", "train.warmup=1", f"train.validate_every={every}"]
    recipe = load_recipe(options.recipes[0], settings)
    if options.one == "lora":
        more = [f"train.lora.rank={options.rank}", f"train.lr={LR_FACTOR * recipe.train.lr}"]
        recipe = load_recipe(options.recipes[0], settings + more)
    trained = 0

    def count(event: dict[str, object]) -> None:
        nonlocal trained
        trained = max(trained, int(str(event.get("trainable_parameters") or event.get("parameters") or 0)))

    with tempfile.TemporaryDirectory() as folder:
        start_time = time.perf_counter()
        train(recipe, Path(folder, "run"), on_event=count)
        seconds = time.perf_counter() - start_time
        scores = evaluate(load(Path(folder, "run"), str(device)))
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0
    memory = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    metric = recipe.train.metric
    return {"metric": metric, "score": scores[metric], "seconds": seconds, "memory": memory, "trained": trained}


if __name__ == "__main__":
    main()
