"""Fine-tuning beside transformers in one run: the same batches, rates, steps and seeds, scored by the same code.

    python -m bench.finetune sst2 cola --model FOLDER        a model or run folder of a BERT, not that of the recipe
    python -m bench.finetune squad --seeds 3 --device cuda --json scores.jsonl
    python -m bench.finetune trec --limit 8                  a rehearsal: so many steps on so many lines
    python -m bench.finetune cola train.lr=5e-5            recipes can be changed as for `clearhead train`

Ours is `clearhead train` by the recipe. Theirs is a plain loop around AutoModelFor…, which gets the batches that ours
gets, padded: AdamW with the recipe's numbers, the same warm-up and decay, clipping, half precision where ours has it,
validations at the same steps, the best of which counts. Their weights are imported and scored by `clearhead evaluate`
in fp32 as ours are; `import` is how far the loss of the imported model was from theirs on the same texts.

Where the recipe reads classes off the mean of all tokens, which no class of theirs does, theirs is BertModel, the mean,
its pooler and the classifier, starting from the very weights that ours starts from.
"""

import argparse
import datetime
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from bench.timing import machine
from clearhead.checkpoint import Loaded, load_model
from clearhead.checkpoint.folder import with_weights
from clearhead.checkpoint.formats import export_model, read_foreign
from clearhead.config.data import Corpus
from clearhead.config.recipe import Recipe, load_recipe
from clearhead.data import IGNORED, Batch, Data, prepare
from clearhead.data.batch_order import batch_plans
from clearhead.data.build_datasets import TASKS
from clearhead.data.dataset import Dataset
from clearhead.data.formats import paths
from clearhead.evaluate.model import evaluate
from clearhead.files import read_document
from clearhead.ops.device import choose_device
from clearhead.predict import Model, load
from clearhead.predict.find import find_model
from clearhead.train.distributed import autocast
from clearhead.train.init_from import class_weights, init_network, tokenizers_for
from clearhead.train.loop import train
from clearhead.train.lr_schedule import lr_at_step
from clearhead.train.objective import Objective
from clearhead.train.validate import better

TASK_CLASSES = {
    "classification": transformers.AutoModelForSequenceClassification,
    "tagging": transformers.AutoModelForTokenClassification,
    "answering": transformers.AutoModelForQuestionAnswering,
    "similarity": transformers.AutoModel,
}
RECIPES = ("sst2", "cola", "mrpc", "mrpc-after-stsb", "trec", "agnews", "stsb", "conll2003", "wnut17", "squad")


class Outcome(NamedTuple):
    """The scores of one fine-tuned model, the seconds it took, and how far an import was off."""

    scores: dict[str, Any]
    seconds: float
    apart: float = 0.0


def main() -> None:
    """Parse the options, run every recipe with every seed on both sides, print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.finetune", description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="+", help=f"of {', '.join(RECIPES)}; and changes like train.lr=5e-5")
    parser.add_argument("--model", help="a model folder, a run folder or a name; without it, the recipe's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds: ten can be run five by five")
    parser.add_argument("--limit", type=int, help="steps, and lines of every file")
    parser.add_argument("--json", type=Path, help="add every outcome to this file, a line each")
    options = parser.parse_intermixed_args()  # changes may stand behind options
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = choose_device(options.device)
    changes = [each for each in options.recipes if "=" in each]
    seeds = range(options.first, options.first + options.seeds)
    print(f"{datetime.date.today()}  {machine(device)}  transformers {transformers.__version__}\n")
    print("| recipe | metric | ours | spread | theirs | spread | ours − theirs | seconds | theirs | import |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for name in (each for each in options.recipes if "=" not in each):
        given = [f"model.init_from={find_model(options.model)}"] if options.model else []
        given += [f"train.device={device}", *changes]
        with tempfile.TemporaryDirectory() as place:
            recipe = load_recipe(name, given)
            if recipe.data.task not in TASK_CLASSES:
                parser.error(f"{name} is {recipe.data.task}; give one of {', '.join(RECIPES)}")
            if options.limit:
                recipe = rehearsal(recipe, options.limit, Path(place))
            both = [run(recipe, seed, device, Path(place)) for seed in seeds]
        show(name, recipe.train.metric, both)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                for seed, (ours, theirs) in zip(seeds, both, strict=True):
                    row = {"recipe": name, "seed": seed, "ours": ours._asdict(), "theirs": theirs._asdict()}
                    file.write(json.dumps(row) + "\n")


def show(name: str, metric: str, both: list[tuple[Outcome, Outcome]]) -> None:
    """A line of the table, and one more for the texts that training has not seen."""
    for key in (metric, f"unseen_{metric}"):
        if key not in both[0][0].scores:
            continue
        means, spreads, seconds = [], [], []
        for side in (0, 1):
            values = [100 * pair[side].scores[key] for pair in both]
            means.append(statistics.fmean(values))
            spreads.append(statistics.stdev(values) if len(values) > 1 else 0.0)
            seconds.append(statistics.fmean(pair[side].seconds for pair in both))
        apart = max(theirs.apart for _, theirs in both)
        print(
            f"| {name} | {key} | {means[0]:.2f} | {spreads[0]:.2f} | {means[1]:.2f} | {spreads[1]:.2f} | "
            f"{means[0] - means[1]:+.2f} | {seconds[0]:.0f} | {seconds[1]:.0f} | {apart:.1e} |",
            flush=True,
        )


def rehearsal(recipe: Recipe, limit: int, place: Path) -> Recipe:
    """The recipe with few steps on small cuts of its files."""

    def small(corpora: tuple[Corpus, ...], lines: int) -> tuple[Corpus, ...]:
        found = [(corpus, tuple(str(cut(path, lines, place)) for path in paths(corpus))) for corpus in corpora]
        return tuple(corpus.model_copy(update={"files": files, "skip": ()}) for corpus, files in found)

    lines = 5000 if recipe.data.task == "tagging" else 20 * limit  # enough to have every tag
    sets = {"train": small(recipe.data.train, lines), "valid": small(recipe.data.valid, 20 * limit)}
    data = recipe.data.model_copy(update=sets)
    few = {"steps": limit, "warmup": max(1, limit // 10), "validate_every": max(1, limit // 2), "save_every": limit}
    return recipe.model_copy(update={"data": data, "train": recipe.train.model_copy(update=few)})


def cut(path: Path, lines: int, place: Path) -> Path:
    """The beginning of a file; of SQuAD's form, a few questions of every article."""
    text = read_document(path)
    if path.name.removesuffix(".gz").endswith(".json"):
        found = json.loads(text)
        for article in found["data"]:
            article["paragraphs"] = article["paragraphs"][:1]
            article["paragraphs"][0]["qas"] = article["paragraphs"][0]["qas"][:2]
        text = json.dumps(found)
    else:
        text = "\n".join(text.split("\n")[:lines]) + "\n"
    small = place / f"{path.parent.name}-{path.name.removesuffix('.gz')}.gz"
    small.write_bytes(gzip.compress(text.encode()))
    return small


def run(recipe: Recipe, seed: int, device: torch.device, place: Path) -> tuple[Outcome, Outcome]:
    """One seed on both sides."""
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
    unseen = recipe.data.task == "classification" and not recipe.data.text_pairs and not recipe.data.held_out
    begun = time.perf_counter()
    train(recipe, place / f"ours-{seed}")
    seconds = time.perf_counter() - begun
    ours = Outcome(evaluate(load(place / f"ours-{seed}", str(device)), unseen=unseen), seconds)
    begun = time.perf_counter()
    best, apart = fine_tune(recipe, device, place / f"theirs-{seed}")
    seconds = time.perf_counter() - begun
    return ours, Outcome(evaluate(best, unseen=unseen), seconds, apart)


def fine_tune(recipe: Recipe, device: torch.device, place: Path) -> tuple[Model, float]:
    """transformers by the recipe: the best model of all validations, imported, and how far its loss was from theirs."""
    settings = recipe.train
    data = prepare(recipe.data, tokenizers_for(recipe))
    torch.manual_seed(settings.seed)
    peer = start(recipe, data, place).to(device).train()
    matrices = [p for p in peer.parameters() if p.dim() >= 2]
    vectors = [p for p in peer.parameters() if p.dim() < 2]
    decay = settings.weight_decay
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True)
    half = settings.precision in ("auto", "bf16") and device.type == "cuda"
    dtype = torch.bfloat16 if half else torch.float32
    weights = class_weights(recipe, data)
    weights = None if weights is None else weights.to(device)
    best: Model | None = None
    score, waited, apart = None, 0, 0.0
    for step, batch in enumerate(padded(recipe, data), 1):
        for group in optimizer.param_groups:
            group["lr"] = lr_at_step(settings, step, settings.steps)
        with autocast(device, dtype):
            found = loss(peer, recipe, batch.to(device), weights)
        found.backward()
        if settings.grad_clip is not None:
            nn.utils.clip_grad_norm_(peer.parameters(), settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % settings.validate_every and step < settings.steps:
            continue
        model = imported(peer, recipe, data, place)
        apart = max(apart, distance(peer, model, recipe, data, weights))
        now = evaluate(model)[settings.metric]
        waited += 1
        if better(settings.metric, now, score):
            best, score, waited = model, now, 0
        if step == settings.steps or (settings.patience is not None and waited >= settings.patience):
            break
    assert best is not None
    return best, apart


def start(recipe: Recipe, data: Data, place: Path) -> Any:
    """The model of the recipe as transformers reads it, with a fresh head for the task."""
    loaded = load_model(find_model(str(recipe.model["folder"])))
    if of_mean(recipe):  # our start, written as if it read the first token: the same tensors under the same names
        network = init_network(recipe, data)
        config = network.config.model_copy(update={"pooling": "class"})
        loaded = Loaded(with_weights(config, network.state_dict()), config, data.tokenizers, {})
    export_model(loaded, place, "hf")
    dropout = {"hidden_dropout_prob": recipe.model.get("dropout", loaded.config.dropout)}
    dropout["attention_probs_dropout_prob"] = recipe.model.get("attention_dropout", loaded.config.attention_dropout)
    labels = {"num_labels": len(data.labels)} if data.labels else {}
    return TASK_CLASSES[recipe.data.task].from_pretrained(place, dtype=torch.float32, **dropout, **labels)


def of_mean(recipe: Recipe) -> bool:
    """Whether classes are read off the mean of all tokens, by the recipe or, where it says nothing, its folder."""
    if recipe.data.task != "classification":
        return False
    folder = str(recipe.model["folder"])
    return recipe.model["pooling"] == "mean" if "pooling" in recipe.model else _has_mean(folder)


@cache
def _has_mean(folder: str) -> bool:
    return load_model(find_model(folder)).config.pooling == "mean"


def padded(recipe: Recipe, data: Data) -> Iterator[Batch]:
    """The batches that our run learns from, padded instead of packed."""
    config = recipe.data.model_copy(update={"packed": False})
    dataset = Dataset(TASKS[config.task](config, data.tokenizers, data.labels), data.train.stores, data.train.weights)
    seed = recipe.train.seed
    for draw in batch_plans(data.train, config.batch_tokens, seed, pool=config.bucket_size, shuffle=True):
        yield dataset.batch(draw.samples, draw.epoch, seed)


def loss(peer: Any, recipe: Recipe, batch: Batch, weights: Tensor | None) -> Tensor:
    """What transformers makes small; for similar sentences, the squared error of the cosine of their means."""
    task = recipe.data.task
    if task == "similarity":
        first, second = (mean(peer, batch[side], batch[f"{side}_lengths"]) for side in ("first", "second"))
        return F.mse_loss(F.cosine_similarity(first.float(), second.float()), batch["labels"].float())
    ids, lengths = batch["ids"], batch["ids_lengths"]
    if of_mean(recipe):  # BertForSequenceClassification but for the mean; its pooler reads the first of what it gets
        pooled = peer.bert.pooler(mean(peer.bert, ids, lengths, batch["segments"])[:, None])
        return cross_entropy(peer.classifier(peer.dropout(pooled)), batch["labels"], weights)
    asked = {"labels": batch["labels"]} if task != "answering" else {}
    if task == "answering":
        asked = {"start_positions": batch["first_token"], "end_positions": batch["last_token"]}
    found = peer(input_ids=ids, attention_mask=seen(ids, lengths), token_type_ids=batch["segments"], **asked)
    plain: Tensor = found.loss
    return plain if weights is None else cross_entropy(found.logits, batch["labels"], weights)


def cross_entropy(scores: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """The mean over all labels, (B,) or (B, T), each times the weight of its class, as ours counts it."""
    scores, labels = scores.float().flatten(0, -2), labels.flatten()
    total = F.cross_entropy(scores, labels, weights, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum()


def seen(ids: Tensor, lengths: Tensor) -> Tensor:
    """1 for tokens, 0 for padding: (B, T)."""
    return (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()


def mean(peer: Any, ids: Tensor, lengths: Tensor, segments: Tensor | None = None) -> Tensor:
    """The mean of the tokens of each row: (B, D)."""
    mask = seen(ids, lengths)
    hidden = peer(input_ids=ids, attention_mask=mask, token_type_ids=segments).last_hidden_state
    return (hidden * mask[..., None]).sum(1) / lengths[:, None]


def imported(peer: Any, recipe: Recipe, data: Data, place: Path) -> Model:
    """Their model as one of ours."""
    peer.save_pretrained(place)
    found = read_foreign(place)
    config = found.config.model_copy(update={"pooling": "mean"}) if of_mean(recipe) else found.config
    network = with_weights(config, found.weights, "transformers").to(peer.device).eval()
    known = recipe.data.model_dump(mode="json")
    return Model(network, data.tokenizers, {"task": recipe.data.task, "labels": list(data.labels), "data": known})


def distance(
    peer: Any, model: Model, recipe: Recipe, data: Data, weights: Tensor | None = None, texts: int = 8
) -> float:
    """How far our loss of the imported model is from theirs, one validation text at a time."""
    assert data.valid is not None
    config = recipe.data.model_copy(update={"packed": False})
    dataset = Dataset(TASKS[config.task](config, data.tokenizers, data.labels), data.valid.stores)
    objective = Objective(model.network, config, recipe.train, weights).eval()
    found = 0.0
    peer.eval()
    with torch.inference_mode():
        for number in np.linspace(0, dataset.size(0) - 1, texts).astype(np.int64):
            batch = dataset.batch(np.array([number]), 0, 0).to(peer.device)
            (ours,) = objective(batch).values()
            found = max(found, float((ours.total / ours.count - loss(peer, recipe, batch, weights)).abs()))
    peer.train()
    return found


if __name__ == "__main__":
    main()
