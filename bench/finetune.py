"""Fine-tuning against transformers: the same batches, learning rates, steps, seeds and evaluation code.

    python -m bench.finetune sst2 cola --model FOLDER        from another BERT model folder or run folder
    python -m bench.finetune squad --seeds 3 --device cuda --json scores.jsonl
    python -m bench.finetune trec --limit 8                  a short trial: 8 steps on small parts of the files
    python -m bench.finetune cola train.lr=5e-5              with recipe overrides, as for `clearhead train`

Ours is `clearhead train` with the recipe. Theirs is a plain loop around AutoModelFor… with the same batches, padded:
the recipe's AdamW settings, learning rate schedule and gradient clipping, bf16 where ours uses it, and validation at
the same steps, keeping the best. Their weights are imported and scored in fp32 by `clearhead evaluate`, like ours;
`import error` is the largest difference between the loss of the imported model and theirs. `speedup` is their training
time over ours.

For recipes with mean pooling, which no transformers class has, theirs is BertModel with mean pooling, its pooler and
classifier, initialized with the same weights as ours.
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
from clearhead.checkpoint import LoadedModel, load_model
from clearhead.checkpoint.formats import export_model, read_foreign
from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.config.data import Corpus
from clearhead.config.recipe import Recipe, load_recipe
from clearhead.data import IGNORED, Batch, Data, prepare
from clearhead.data.batch_order import batch_plans
from clearhead.data.build_datasets import TASKS
from clearhead.data.corpus_files import corpus_files
from clearhead.data.dataset import Dataset
from clearhead.evaluate.model import evaluate
from clearhead.files import read_document
from clearhead.ops.device import choose_device
from clearhead.predict import Model, load
from clearhead.predict.find import find_model
from clearhead.train.distributed import autocast
from clearhead.train.init_from import class_weights, init_network, load_initial_model, tokenizers_for
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
    """Scores of a fine-tuned model, its training time in seconds, and the import error."""

    scores: dict[str, Any]
    seconds: float
    apart: float = 0.0


def main() -> None:
    """Parse the options, run every recipe with every seed on both sides, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.finetune", description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="+", help=f"of {', '.join(RECIPES)}; and overrides such as train.lr=5e-5")
    parser.add_argument("--model", help="a model folder, run folder or name; default: the recipe's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--limit", type=int, help="a short trial: this many steps on small parts of the files")
    parser.add_argument("--json", type=Path, help="append every result to this file, one per line")
    options = parser.parse_intermixed_args()  # overrides may follow options
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = choose_device(options.device)
    overrides = [arg for arg in options.recipes if "=" in arg]
    seeds = range(options.first, options.first + options.seeds)
    print(f"{datetime.date.today()}  {machine(device)}  transformers {transformers.__version__}\n")
    print("| recipe | metric | ours | std | theirs | std | ours − theirs | seconds | theirs | speedup | import error |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for name in (arg for arg in options.recipes if "=" not in arg):
        settings = [f"model.init_from={find_model(options.model)}"] if options.model else []
        settings += [f"train.device={device}", *overrides]
        with tempfile.TemporaryDirectory() as folder:
            recipe = load_recipe(name, settings)
            if recipe.data.task not in TASK_CLASSES:
                parser.error(f"{name}: its task is {recipe.data.task}; use one of {', '.join(RECIPES)}")
            if options.limit:
                recipe = short_trial(recipe, options.limit, Path(folder))
            results = [run(recipe, seed, device, Path(folder)) for seed in seeds]
        report(name, recipe.train.metric, results)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                for seed, (ours, theirs) in zip(seeds, results, strict=True):
                    row = {"recipe": name, "seed": seed, "ours": ours._asdict(), "theirs": theirs._asdict()}
                    file.write(json.dumps(row) + "\n")


def report(name: str, metric: str, results: list[tuple[Outcome, Outcome]]) -> None:
    """Print a line of the table, and one for texts that are not in the training data."""
    for key in (metric, f"unseen_{metric}"):
        if key not in results[0][0].scores:
            continue
        means, stds, seconds = [], [], []
        for side in (0, 1):
            values = [100 * pair[side].scores[key] for pair in results]
            means.append(statistics.fmean(values))
            stds.append(statistics.stdev(values) if len(values) > 1 else 0.0)
            seconds.append(statistics.fmean(pair[side].seconds for pair in results))
        apart = max(theirs.apart for _, theirs in results)
        print(
            f"| {name} | {key} | {means[0]:.2f} | {stds[0]:.2f} | {means[1]:.2f} | {stds[1]:.2f} | "
            f"{means[0] - means[1]:+.2f} | {seconds[0]:.0f} | {seconds[1]:.0f} | "
            f"{seconds[1] / seconds[0]:.2f} | {apart:.1e} |",
            flush=True,
        )


def short_trial(recipe: Recipe, limit: int, folder: Path) -> Recipe:
    """Return the recipe with few steps on the beginnings of its files."""

    def shorten(corpora: tuple[Corpus, ...], lines: int) -> tuple[Corpus, ...]:
        files = [tuple(str(head(path, lines, folder)) for path in corpus_files(corpus)) for corpus in corpora]
        pairs = zip(corpora, files, strict=True)
        return tuple(corpus.model_copy(update={"files": files, "skip": ()}) for corpus, files in pairs)

    lines = 5000 if recipe.data.task == "tagging" else 20 * limit  # enough to contain every tag
    splits = {"train": shorten(recipe.data.train, lines), "valid": shorten(recipe.data.valid, 20 * limit)}
    data = recipe.data.model_copy(update=splits)
    steps = {"steps": limit, "warmup": max(1, limit // 10), "validate_every": max(1, limit // 2), "save_every": limit}
    return recipe.model_copy(update={"data": data, "train": recipe.train.model_copy(update=steps)})


def head(path: Path, lines: int, folder: Path) -> Path:
    """Write the beginning of a file, or of SQuAD's JSON two questions per article, and return its path."""
    text = read_document(path)
    if path.name.removesuffix(".gz").endswith(".json"):
        document = json.loads(text)
        for article in document["data"]:
            article["paragraphs"] = article["paragraphs"][:1]
            article["paragraphs"][0]["qas"] = article["paragraphs"][0]["qas"][:2]
        text = json.dumps(document)
    else:
        text = "\n".join(text.split("\n")[:lines]) + "\n"
    out = folder / f"{path.parent.name}-{path.name.removesuffix('.gz')}.gz"
    out.write_bytes(gzip.compress(text.encode()))
    return out


def run(recipe: Recipe, seed: int, device: torch.device, folder: Path) -> tuple[Outcome, Outcome]:
    """Train and evaluate both sides with one seed."""
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
    unseen = recipe.data.task == "classification" and not recipe.data.text_pairs and not recipe.data.held_out
    start_time = time.perf_counter()
    train(recipe, folder / f"ours-{seed}")
    seconds = time.perf_counter() - start_time
    ours = Outcome(evaluate(load(folder / f"ours-{seed}", str(device)), unseen=unseen), seconds)
    start_time = time.perf_counter()
    best, apart = fine_tune(recipe, device, folder / f"theirs-{seed}")
    seconds = time.perf_counter() - start_time
    return ours, Outcome(evaluate(best, unseen=unseen), seconds, apart)


def fine_tune(recipe: Recipe, device: torch.device, folder: Path) -> tuple[Model, float]:
    """Fine-tune with transformers; return the best validated model, imported, and the import error."""
    settings = recipe.train
    data = prepare(recipe.data, tokenizers_for(recipe, load_initial_model(recipe)))
    torch.manual_seed(settings.seed)
    peer = start(recipe, data, folder).to(device).train()
    matrices = [p for p in peer.parameters() if p.dim() >= 2]
    vectors = [p for p in peer.parameters() if p.dim() < 2]
    decay = settings.weight_decay
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True)
    use_bf16 = settings.precision in ("auto", "bf16") and device.type == "cuda"
    dtype = torch.bfloat16 if use_bf16 else torch.float32
    weights = class_weights(recipe, data)
    weights = None if weights is None else weights.to(device)
    best: Model | None = None
    best_score, validations_since_best, apart = None, 0, 0.0
    for step, batch in enumerate(padded(recipe, data), 1):
        for group in optimizer.param_groups:
            group["lr"] = lr_at_step(settings, step, settings.steps)
        with autocast(device, dtype):
            batch_loss = loss(peer, recipe, batch.to(device), weights)
        batch_loss.backward()
        if settings.grad_clip is not None:
            nn.utils.clip_grad_norm_(peer.parameters(), settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % settings.validate_every and step < settings.steps:
            continue
        model = imported(peer, recipe, data, folder)
        apart = max(apart, distance(peer, model, recipe, data, weights))
        score = evaluate(model)[settings.metric]
        validations_since_best += 1
        if better(settings.metric, score, best_score):
            best, best_score, validations_since_best = model, score, 0
        if step == settings.steps or (settings.patience is not None and validations_since_best >= settings.patience):
            break
    assert best is not None
    return best, apart


def start(recipe: Recipe, data: Data, folder: Path) -> Any:
    """Load the recipe's initial model in transformers, with a new head for the task."""
    loaded = load_model(find_model(str(recipe.model["init_from"])))
    if of_mean(recipe):  # export our initial weights with CLS pooling: the tensors have the same names
        network = init_network(recipe, data, loaded)
        config = network.config.model_copy(update={"pooling": "cls"})
        loaded = LoadedModel(build_with_weights(config, network.state_dict()), config, data.tokenizers, {})
    export_model(loaded, folder, "hf")
    dropout = {"hidden_dropout_prob": recipe.model.get("dropout", loaded.config.dropout)}
    dropout["attention_probs_dropout_prob"] = recipe.model.get("attention_dropout", loaded.config.attention_dropout)
    labels = {"num_labels": len(data.labels)} if data.labels else {}
    return TASK_CLASSES[recipe.data.task].from_pretrained(folder, dtype=torch.float32, **dropout, **labels)


def of_mean(recipe: Recipe) -> bool:
    """Whether the classifier uses mean pooling, as set by the recipe or else by its initial model."""
    if recipe.data.task != "classification":
        return False
    folder = str(recipe.model["init_from"])
    return recipe.model["pooling"] == "mean" if "pooling" in recipe.model else _has_mean(folder)


@cache
def _has_mean(folder: str) -> bool:
    return load_model(find_model(folder)).config.pooling == "mean"


def padded(recipe: Recipe, data: Data) -> Iterator[Batch]:
    """Yield the batches of our run, padded instead of packed."""
    config = recipe.data.model_copy(update={"packed": False})
    dataset = Dataset(TASKS[config.task](config, data.tokenizers, data.labels), data.train.stores, data.train.weights)
    seed = recipe.train.seed
    for plan in batch_plans(data.train, config.batch_tokens, seed, bucket_size=config.bucket_size, shuffle=True):
        yield dataset.batch(plan.samples, plan.epoch, seed)


def loss(peer: Any, recipe: Recipe, batch: Batch, weights: Tensor | None) -> Tensor:
    """Return transformers' loss; for sentence similarity, the squared error of the cosine of mean-pooled embeddings."""
    task = recipe.data.task
    if task == "similarity":
        first, second = (mean(peer, batch[side], batch[f"{side}_lengths"]) for side in ("first", "second"))
        return F.mse_loss(F.cosine_similarity(first.float(), second.float()), batch["labels"].float())
    ids, lengths = batch["ids"], batch["ids_lengths"]
    if of_mean(recipe):  # BertForSequenceClassification with mean pooling; its pooler reads position 0
        pooled = peer.bert.pooler(mean(peer.bert, ids, lengths, batch["segments"])[:, None])
        return cross_entropy(peer.classifier(peer.dropout(pooled)), batch["labels"], weights)
    targets = {"labels": batch["labels"]} if task != "answering" else {}
    if task == "answering":
        targets = {"start_positions": batch["first_token"], "end_positions": batch["last_token"]}
    output = peer(input_ids=ids, attention_mask=padding_mask(ids, lengths), token_type_ids=batch["segments"], **targets)
    unweighted: Tensor = output.loss
    return unweighted if weights is None else cross_entropy(output.logits, batch["labels"], weights)


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Class-weighted loss over labels (B,) or (B, T), divided by the number of labels as ours is."""
    logits, labels = logits.float().flatten(0, -2), labels.flatten()
    total = F.cross_entropy(logits, labels, weights, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum()


def padding_mask(ids: Tensor, lengths: Tensor) -> Tensor:
    """Return 1 for tokens and 0 for padding: (B, T)."""
    return (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()


def mean(peer: Any, ids: Tensor, lengths: Tensor, segments: Tensor | None = None) -> Tensor:
    """Mean-pool the hidden states of each row: (B, D)."""
    mask = padding_mask(ids, lengths)
    hidden = peer(input_ids=ids, attention_mask=mask, token_type_ids=segments).last_hidden_state
    return (hidden * mask[..., None]).sum(1) / lengths[:, None]


def imported(peer: Any, recipe: Recipe, data: Data, folder: Path) -> Model:
    """Import the transformers model."""
    peer.save_pretrained(folder)
    foreign = read_foreign(folder)
    config = foreign.config.model_copy(update={"pooling": "mean"}) if of_mean(recipe) else foreign.config
    network = build_with_weights(config, foreign.weights, "transformers").to(peer.device).eval()
    extra = {"task": recipe.data.task, "labels": list(data.labels), "data": recipe.data.model_dump(mode="json")}
    return Model(network, data.tokenizers, extra)


def distance(
    peer: Any, model: Model, recipe: Recipe, data: Data, weights: Tensor | None = None, texts: int = 8
) -> float:
    """Return the largest difference between our loss of the imported model and theirs, over some validation texts."""
    assert data.valid is not None
    config = recipe.data.model_copy(update={"packed": False})
    dataset = Dataset(TASKS[config.task](config, data.tokenizers, data.labels), data.valid.stores)
    objective = Objective(model.network, config, recipe.train, weights).eval()
    largest = 0.0
    peer.eval()
    with torch.inference_mode():
        for index in np.linspace(0, dataset.num_samples(0) - 1, texts).astype(np.int64):
            batch = dataset.batch(np.array([index]), 0, 0).to(peer.device)
            (ours,) = objective(batch).values()
            largest = max(largest, float((ours.total / ours.count - loss(peer, recipe, batch, weights)).abs()))
    peer.train()
    return largest


if __name__ == "__main__":
    main()
