"""What pretraining is worth: SST-2 with few labeled examples, from a pretrained BERT, from the same BERT with fresh
weights, and from a bag of words.

    python -m bench.pretrained                                     the BERT of the package, 1,000 examples
    python -m bench.pretrained runs/bert-small --device cuda
    python -m bench.pretrained runs/bert-small --pooling class     read off the first token alone, not the mean of all

All three learn from the same random rows of SST-2's training file and are scored on its development file. Both BERTs
choose their learning rate and their best step on as many other rows; the bag of words has nothing to choose.
"""

import argparse
import datetime
import gzip
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.bag import ours as bag
from bench.bag import rows
from bench.timing import machine
from clearhead.checkpoint import load_model, save_model
from clearhead.config.data import Corpus
from clearhead.config.recipe import Recipe, load_recipe
from clearhead.evaluate import accuracy
from clearhead.evaluate.model import evaluate
from clearhead.model import build
from clearhead.ops.device import choose_device
from clearhead.predict import load
from clearhead.predict.find import find_model
from clearhead.train.sweep import run_folder, sweep

HEAD = ("sentence", "label")
RATES = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3)
FEW = {"steps": 300, "warmup": 30, "validate_every": 50, "save_every": 300}


def main() -> None:
    """Parse the options, train both, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.pretrained", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="novels-bert", help="a model folder, a run folder or a name")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pooling", choices=["mean", "class"], default="mean", help="what a BERT's class is read off")
    options = parser.parse_args()
    device = choose_device(options.device)
    print(f"{datetime.date.today()}  {machine(device)}  {options.model}, {options.examples:,} examples of SST-2\n")
    labeled = list(rows("sst2/train.tsv.gz", header=True))
    random.Random(0).shuffle(labeled)
    learn, choose = labeled[: options.examples], labeled[options.examples : 2 * options.examples]
    test = rows("sst2/dev.tsv.gz", header=True)
    print("| start | rate | accuracy | spread |\n| --- | ---: | ---: | ---: |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        recipe = few_shot(learn, choose, place, str(device), options.pooling)
        starts = {"pretrained": find_model(options.model), "fresh weights": fresh(options.model, place / "fresh")}
        for start, folder in starts.items():
            rate, found = scores(recipe, folder, place / f"{start} runs", options.seeds)
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            print(f"| {start} | {rate:g} | {statistics.fmean(found):.2%} | {spread:.2%} |", flush=True)
    right = accuracy(bag(learn, test), [label for _, label in test])
    print(f"| bag of words | | {right:.2%} | |")


def few_shot(learn: Any, choose: Any, place: Path, device: str, pooling: str) -> Recipe:
    """SST-2's recipe on some rows, validated on others, tested on the development file."""
    recipe = load_recipe("sst2", [f"train.device={device}", "train.compile=off", f"model.pooling={pooling}"])
    (whole,) = recipe.data.train
    sets: dict[str, tuple[Corpus, ...]] = {"test": recipe.data.valid}
    for part, lines in (("train", learn), ("valid", choose)):
        path = place / f"{part}.tsv.gz"
        path.write_bytes(gzip.compress("".join(f"{text}\t{label}\n" for text, label in [HEAD, *lines]).encode()))
        sets[part] = (whole.model_copy(update={"files": (str(path),)}),)
    data = recipe.data.model_copy(update=sets | {"cache_dir": str(place / "cache")})
    return recipe.model_copy(update={"data": data, "train": recipe.train.model_copy(update=FEW)})


def fresh(model: str, folder: Path) -> Path:
    """The same architecture and tokenizer, with weights that have learned nothing."""
    loaded = load_model(find_model(model))
    torch.manual_seed(0)
    save_model(folder, build(loaded.config), loaded.tokenizers, loaded.extra)
    return folder


def scores(recipe: Recipe, folder: Path, place: Path, seeds: int) -> tuple[float, list[float]]:
    """The rate with the best validation, and the test accuracy of every seed with it."""
    changed = recipe.model_copy(update={"model": recipe.model | {"folder": str(folder)}})
    table = sweep(changed, place, RATES, 1, False, quiet, quiet)
    if table is None:
        raise SystemExit("stopped")
    rate = next(line["rate"] for line in table if line["best"])
    sweep(changed, place, [rate], seeds, True, quiet, quiet)
    models = (load(run_folder(place, rate, seed) / "best", recipe.train.device) for seed in range(seeds))
    return rate, [evaluate(model)["accuracy"] for model in models]


def quiet(_: Any) -> None:
    """Nobody watches these runs."""


if __name__ == "__main__":
    main()
