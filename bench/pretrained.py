"""SST-2 accuracy with few labeled examples: pretrained BERT, the same BERT from scratch, and a bag of words.

    python -m bench.pretrained                                     the included BERT, 1,000 examples
    python -m bench.pretrained runs/bert-small --device cuda
    python -m bench.pretrained runs/bert-small --pooling cls       CLS instead of mean pooling

All three are trained on the same random rows of SST-2's training file and scored on its dev file. The BERTs select
their learning rate and best step on as many other rows; the bag of words has no hyperparameters. `ratio` is to its
accuracy.
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
from clearhead.config.grid import GridPoint
from clearhead.config.recipe import Recipe, load_recipe
from clearhead.evaluate import accuracy
from clearhead.evaluate.model import evaluate
from clearhead.model import build
from clearhead.ops.device import choose_device
from clearhead.predict import load
from clearhead.predict.find import find_model
from clearhead.train.sweep import run_folder, sweep

COLUMNS = ("sentence", "label")
LRS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3)
SETTINGS = {"steps": 300, "warmup": 30, "validate_every": 50, "save_every": 300}


def main() -> None:
    """Parse the options, train all three, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.pretrained", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="novels-bert", help="a model folder, a run folder or a name")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pooling", choices=["mean", "cls"], default="mean", help="pooling of the BERTs")
    options = parser.parse_args()
    device = choose_device(options.device)
    print(f"{datetime.date.today()}  {machine(device)}  {options.model}, {options.examples:,} examples of SST-2\n")
    labeled = list(rows("sst2/train.tsv.gz", header=True))
    random.Random(0).shuffle(labeled)
    train, valid = labeled[: options.examples], labeled[options.examples : 2 * options.examples]
    test = rows("sst2/dev.tsv.gz", header=True)
    baseline = accuracy(bag(train, test), [label for _, label in test])
    print("| model | lr | accuracy | std | ratio |\n| --- | ---: | ---: | ---: | ---: |", flush=True)
    print(f"| bag of words | | {baseline:.2%} | | 1.00 |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        recipe = few_shot(train, valid, root, str(device), options.pooling)
        scratch = from_scratch(options.model, root / "scratch")
        models = {"pretrained": find_model(options.model), "from scratch": scratch}
        for model, folder in models.items():
            lr, accuracies = scores(recipe, folder, root / f"{model} runs", options.seeds)
            mean, std = statistics.fmean(accuracies), statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
            print(f"| {model} | {lr:g} | {mean:.2%} | {std:.2%} | {mean / baseline:.2f} |", flush=True)


def few_shot(train: Any, valid: Any, folder: Path, device: str, pooling: str) -> Recipe:
    """Return SST-2's recipe with these training and validation rows, tested on the dev file."""
    recipe = load_recipe("sst2", [f"train.device={device}", "train.compile=off", f"model.pooling={pooling}"])
    (corpus,) = recipe.data.train
    splits: dict[str, tuple[Corpus, ...]] = {"test": recipe.data.valid}
    for split, lines in (("train", train), ("valid", valid)):
        path = folder / f"{split}.tsv.gz"
        path.write_bytes(gzip.compress("".join(f"{text}\t{label}\n" for text, label in [COLUMNS, *lines]).encode()))
        splits[split] = (corpus.model_copy(update={"files": (str(path),)}),)
    data = recipe.data.model_copy(update=splits | {"cache_dir": str(folder / "cache")})
    return recipe.model_copy(update={"data": data, "train": recipe.train.model_copy(update=SETTINGS)})


def from_scratch(model: str, folder: Path) -> Path:
    """Save a randomly initialized model with the same architecture and tokenizer."""
    loaded = load_model(find_model(model))
    torch.manual_seed(0)
    save_model(folder, build(loaded.config), loaded.tokenizers, loaded.extra)
    return folder


def scores(recipe: Recipe, folder: Path, out: Path, seeds: int) -> tuple[float, list[float]]:
    """Return the learning rate with the best validation, and the test accuracy of every seed with it."""
    changed = recipe.model_copy(update={"model": recipe.model | {"init_from": str(folder)}})
    grid = [GridPoint({"train.lr": lr}, with_lr(changed, lr)) for lr in LRS]
    table = sweep(grid, 1, out, False, quiet, quiet)
    if table is None:
        raise SystemExit("stopped")
    lr = table[0]["settings"]["train.lr"]
    best = GridPoint({"train.lr": lr}, with_lr(changed, lr))
    sweep([best], seeds, out, True, quiet, quiet)
    models = (load(run_folder(out, best.values, seed) / "best", recipe.train.device) for seed in range(seeds))
    return lr, [evaluate(model)["accuracy"] for model in models]


def with_lr(recipe: Recipe, lr: float) -> Recipe:
    """Return the recipe with another learning rate."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"lr": lr})})


def quiet(_: Any) -> None:
    """Discard a run's progress messages."""


if __name__ == "__main__":
    main()
