"""How good the model is now: losses on held-out data, BLEU and chrF of what it writes, scores of what it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypedDict

import numpy as np
import torch

from clearhead.config.data import DataConfig
from clearhead.config.generation import GenerationConfig
from clearhead.config.train import TrainConfig
from clearhead.data import Data, Dataset, Loader
from clearhead.data.tasks import LanguageModel, Translation
from clearhead.evaluate.bleu import bleu, chrf
from clearhead.evaluate.labeled import LABELED, own_records, score_labeled
from clearhead.inference import generate, translate
from clearhead.inference.model_runner import pad
from clearhead.model import Decoder, EncoderDecoder, Network
from clearhead.predict import Model
from clearhead.text import Tokenizer
from clearhead.train.distributed import DistContext, autocast, uncompiled
from clearhead.train.exposure_bias import exposure_bias
from clearhead.train.objective import Objective
from clearhead.train.updater import Progress

EXPOSED = 100  # validation samples whose exposure bias is measured
HIGHER = (
    "bleu",
    "chrf",
    "accuracy",
    "exact",
    "f1",
    "matthews",
    "pearson",
    "spearman",
)  # metrics of which more is better


class Sample(TypedDict, total=False):
    """Something to read: what went in, what was expected, what came out."""

    source: str
    reference: str
    output: str


def better(metric: str, new: float, old: float | None) -> bool:
    """Whether a score beats the best so far; the same is not better, and what is no number never is."""
    return math.isfinite(new) and (old is None or (new > old if metric in HIGHER else new < old))


def losses(
    objective: Objective,
    dataset: Dataset,
    data: DataConfig,
    place: DistContext,
    dtype: torch.dtype,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Mean losses over a data set, without dropout and smoothing; perplexity is of the words."""
    loader = Loader(
        dataset,
        tokens=data.batch_tokens,
        shuffle=False,
        pool=data.bucket_size,
        rank=place.rank,
        processes=place.world_size,
        workers=min(data.workers, 1),
    )
    progress = Progress()
    trains = objective.training
    objective.eval()
    try:
        with torch.no_grad(), uncompiled(objective.network):
            for step in loader:
                for batch in step.batches:
                    with autocast(place.device, dtype):
                        progress.add(objective(batch.to(place.device)))
                if place.any(stopped()):
                    return {}
    finally:
        objective.train(trains)
    means = progress.means(place)
    if "words" in progress.sums:
        means["perplexity"] = math.exp(min(means["loss"], 700))
    return means


def scores(
    network: Network, data: Data, settings: TrainConfig, place: DistContext, dtype: torch.dtype
) -> tuple[dict[str, Any], list[Sample]]:
    """What the model writes for some validation samples: scores with their signature, and a few samples to read."""
    labeled = data.task.config.task in LABELED
    if data.valid is None or not (settings.eval_samples or labeled):
        return {}, []
    trains = network.training
    network.eval()
    # On a CPU, texts are read by weights that are packed in a dtype of their own.
    halves = nullcontext() if labeled and place.device.type == "cpu" else autocast(place.device, dtype)
    try:
        with torch.no_grad(), halves, uncompiled(network):
            if isinstance(network, EncoderDecoder) and isinstance(data.task, Translation):
                return _translations(network, data, settings.eval_samples)
            if isinstance(network, Decoder) and isinstance(data.task, LanguageModel):
                return {}, _continuations(network, data)
            if labeled:
                return _labeled(network, data)
    finally:
        network.train(trains)
    return {}, []


def _labeled(network: Network, data: Data) -> tuple[dict[str, Any], list[Sample]]:
    """The scores that `clearhead evaluate` gives, over all validation data."""
    config = data.task.config
    extra = {"task": config.task, "labels": list(data.labels), "data": config.model_dump(mode="json")}
    model = Model(network, data.tokenizers, extra, "the model")
    found = score_labeled(model, config, own_records(model, config, config.valid))
    table = {} if found.confusion is None else {"confusion": found.confusion}
    return found.numbers | table, [Sample(**each) for each in found.samples]  # type: ignore[typeddict-item]


def _translations(network: EncoderDecoder, data: Data, most: int) -> tuple[dict[str, Any], list[Sample]]:
    assert data.valid is not None
    source, target = data.tokenizers[0], data.tokenizers[-1]
    size = data.valid.size(0)
    chosen = np.linspace(0, size - 1, min(most, size)).astype(np.int64)
    pairs: list[tuple[list[int], list[int]]] = []
    for sample in chosen:
        batch = data.valid.batch(np.array([sample]), 0, 0)
        pairs.append((batch["source"][0].tolist(), batch["labels"][0].tolist()))
    max_length = max(len(reference) for _, reference in pairs)
    limit = min(2 * max_length + 10, network.config.max_positions - 1)
    found = translate(
        network,
        [ids for ids, _ in pairs],
        GenerationConfig(max_new_tokens=limit),
        begin=target.id("begin"),
        end=target.id("end"),
    )
    outputs = target.decode_batch([answers[0].ids for answers in found])
    references = target.decode_batch([reference for _, reference in pairs])
    sources = source.decode_batch([ids for ids, _ in pairs])
    scored = {"bleu": bleu(outputs, references), "chrf": chrf(outputs, references)}
    numbers: dict[str, Any] = {name: score.value for name, score in scored.items()}
    numbers["exact"] = sum(a == b for a, b in zip(outputs, references, strict=True)) / len(outputs)
    numbers["signature"] = {name: score.signature for name, score in scored.items()}
    numbers |= _exposure(network, pairs[:EXPOSED], target)
    shown = list(zip(sources, references, outputs, strict=True))[:: max(1, len(outputs) // 5)][:5]
    return numbers, [Sample(source=s, reference=r, output=o) for s, r, o in shown]


def _exposure(network: EncoderDecoder, pairs: list[tuple[list[int], list[int]]], target: Tokenizer) -> dict[str, Any]:
    """Exposure bias: accuracy after true words and after the model's own, by place in the target, and their gap."""
    sources, targets = [ids for ids, _ in pairs], [[target.id("begin"), *reference] for _, reference in pairs]
    device = network.decoder.embedding.tokens.weight.device
    sizes = [torch.tensor([len(row) for row in rows], device=device) for rows in (sources, targets)]
    padded = [pad(rows, device)[0] for rows in (sources, targets)]
    found = exposure_bias(network, padded[0], sizes[0], padded[1], sizes[1], target.id("end"))
    count = found.count.clamp(min=1)
    by_place = {"forced": (found.forced / count).tolist(), "free": (found.free / count).tolist()}
    return {"exposure_bias": float(found.mean), "exposure": by_place}


def _continuations(network: Decoder, data: Data) -> list[Sample]:
    """How the model goes on from the beginnings of a few validation windows."""
    assert data.valid is not None
    tokenizer = data.tokenizers[0]
    size = data.valid.size(0)
    prompts = []
    for sample in np.linspace(0, size - 1, min(3, size)).astype(np.int64):
        ids = data.valid.batch(np.array([sample]), 0, 0)["ids"][0].tolist()
        prompts.append(ids[: max(1, min(32, len(ids) // 2))])
    room = max(1, min(100, network.config.max_positions - max(map(len, prompts)) - 1))
    end = [tokenizer.roles["end"]] if "end" in tokenizer.roles else []  # without one, it goes on to the limit
    found = generate(network, prompts, GenerationConfig(max_new_tokens=room, temperature=0.8, top_p=0.95), end=end)
    return [
        Sample(source=tokenizer.decode(prompt), output=tokenizer.decode(answers[0].ids))
        for prompt, answers in zip(prompts, found, strict=True)
    ]
