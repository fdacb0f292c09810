"""Validation: losses on held-out data, BLEU and chrF of decoded samples, metrics of labeled tasks."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any, TypedDict

import numpy as np
import torch

from clearhead.checkpoint import build_with_weights, gather_weights
from clearhead.config.data import DataConfig
from clearhead.config.generation import GenerationConfig
from clearhead.config.train import TrainConfig
from clearhead.data import Data, Dataset, Loader
from clearhead.data.tasks import LanguageModel, Translation
from clearhead.evaluate.bleu import bleu, chrf
from clearhead.evaluate.labeled import LABELED_TASKS, eval_records, score_labeled
from clearhead.inference import alignment_weights, generate, translate
from clearhead.inference.model_runner import pad_batch
from clearhead.model import Decoder, EncoderDecoder, Network
from clearhead.predict import Model
from clearhead.predict.inspect import shown
from clearhead.text import Tokenizer
from clearhead.train.checkpointing import save_model_folder
from clearhead.train.distributed import DistContext, autocast, uncompiled
from clearhead.train.events import write_event
from clearhead.train.exposure_bias import exposure_bias
from clearhead.train.objective import Objective
from clearhead.train.signals import StopSignal
from clearhead.train.state import Event, RunState
from clearhead.train.updater import Metrics

EXPOSURE_SAMPLES = 100  # validation samples whose exposure bias is measured
SHOWN = 5  # samples, and worst mistakes
MAX_DRAWN = 24  # tokens of a side in a picture of attention
HIGHER_IS_BETTER = ("bleu", "chrf", "accuracy", "exact", "f1", "matthews", "pearson", "spearman")


class Sample(TypedDict, total=False):
    """One decoded validation sample."""

    source: str
    reference: str
    output: str
    mistake: str  # of the worst ones: how wrong it is


def validate(run: RunState, stop: StopSignal | None = None) -> None:
    """Evaluate on the validation data, and save the model as `best` if the metric improved."""
    if run.data.valid is None:
        return
    start, dtype = time.perf_counter(), run.updater.dtype
    results: Event = dict(evaluate_losses(run.objective, run.data.valid, run.recipe.data, run.dist, dtype, stop))
    run.validation_pending = not results
    if run.validation_pending:
        return  # a stop was requested
    samples: list[Sample] = []
    network = _unsharded_network(run)
    if network is not None:
        scores, samples = evaluate_outputs(network, run.data, run.settings, run.dist, dtype)
        results |= scores
    run.log_time += time.perf_counter() - start
    seconds = time.perf_counter() - run.start_time
    run.validation = {"kind": "validation", "step": run.step, **results, "samples": samples, "seconds": seconds}
    write_event(run, run.validation)
    metric = run.settings.metric
    value = results[metric] if run.dist.is_main else 0.0  # only the main process has decoded
    value = float(run.dist.sum(torch.tensor([value], dtype=torch.float64))[0])
    if better(metric, value, run.best):
        run.best, run.validations_since_best = value, 0
        save_model_folder(run, "best")
    else:
        run.validations_since_best += 1


def better(metric: str, new: float, old: float | None) -> bool:
    """Whether a metric improved on the best so far; equal or not finite is no improvement."""
    return math.isfinite(new) and (old is None or (new > old if metric in HIGHER_IS_BETTER else new < old))


def _unsharded_network(run: RunState) -> Network | None:
    """On the main process, a network that decodes by itself: with FSDP or LoRA, of gathered weights."""
    if run.lora is None and (run.dist.world_size == 1 or run.settings.parallel == "ddp"):
        return run.network if run.dist.is_main else None
    weights = gather_weights(run.network)
    if run.lora is not None and run.dist.is_main:
        weights = run.lora.merge(weights)
    return build_with_weights(run.network.config, weights).to(run.dist.device) if run.dist.is_main else None


def evaluate_losses(
    objective: Objective,
    dataset: Dataset,
    data: DataConfig,
    dist: DistContext,
    dtype: torch.dtype,
    stop: StopSignal | None = None,
) -> dict[str, float]:
    """Return mean losses without dropout and label smoothing, and token perplexity; empty if a stop was requested."""
    loader = Loader(
        dataset,
        batch_tokens=data.batch_tokens,
        shuffle=False,
        bucket_size=data.bucket_size,
        rank=dist.rank,
        world_size=dist.world_size,
        workers=min(data.workers, 1),
    )
    metrics = Metrics()
    was_training = objective.training
    objective.eval()
    try:
        with torch.no_grad(), uncompiled(objective.network):
            for global_batch in loader:
                for batch in global_batch.batches:
                    with autocast(dist.device, dtype):
                        metrics.add(objective(batch.to(dist.device)))
                if dist.any(bool(stop)):
                    return {}
    finally:
        objective.train(was_training)
    means = metrics.means(dist)
    if "lm" in metrics.sums:
        means["perplexity"] = math.exp(min(means["loss"], 700))
    return means


def evaluate_outputs(
    network: Network, data: Data, settings: TrainConfig, dist: DistContext, dtype: torch.dtype
) -> tuple[dict[str, Any], list[Sample]]:
    """Return the metrics of the model's outputs on validation data, and a few samples to read."""
    labeled = data.task.config.task in LABELED_TASKS
    if data.valid is None or not (settings.eval_samples or labeled):
        return {}, []
    was_training = network.training
    network.eval()
    # On a CPU, labeled tasks run on packed weights with a dtype of their own.
    precision = nullcontext() if labeled and dist.device.type == "cpu" else autocast(dist.device, dtype)
    try:
        with torch.no_grad(), precision, uncompiled(network):
            if isinstance(network, EncoderDecoder) and isinstance(data.task, Translation):
                return _evaluate_translations(network, data, settings.eval_samples)
            if isinstance(network, Decoder) and isinstance(data.task, LanguageModel):
                return {}, _sample_continuations(network, data)
            if labeled:
                return _evaluate_labeled(network, data)
    finally:
        network.train(was_training)
    return {}, []


def _evaluate_labeled(network: Network, data: Data) -> tuple[dict[str, Any], list[Sample]]:
    """The metrics of `clearhead evaluate` over all validation data."""
    config = data.task.config
    extra = {"task": config.task, "labels": list(data.labels), "data": config.model_dump(mode="json")}
    model = Model(network, data.tokenizers, extra, "the model")
    result = score_labeled(model, config, eval_records(model, config, config.valid))
    confusion = {} if result.confusion is None else {"confusion": result.confusion}
    mistakes = {"mistakes": result.mistakes} if result.mistakes else {}
    return result.metrics | confusion | mistakes, [Sample(**sample) for sample in result.samples]  # type: ignore[typeddict-item]


def _evaluate_translations(network: EncoderDecoder, data: Data, count: int) -> tuple[dict[str, Any], list[Sample]]:
    """BLEU, chrF and exact match of `count` translations, and exposure bias."""
    assert data.valid is not None
    source, target = data.tokenizers[0], data.tokenizers[-1]
    size = data.valid.num_samples(0)
    pairs: list[tuple[list[int], list[int]]] = []
    for index in np.linspace(0, size - 1, min(count, size)).astype(np.int64):
        batch = data.valid.batch(np.array([index]), 0, 0)
        pairs.append((batch["source"][0].tolist(), batch["labels"][0].tolist()))
    max_length = max(len(reference) for _, reference in pairs)
    limit = min(2 * max_length + 10, network.config.max_positions - 1)
    hypotheses = translate(
        network,
        [ids for ids, _ in pairs],
        GenerationConfig(max_new_tokens=limit),
        bos_id=target.id("begin"),
        eos_ids=target.id("end"),
    )
    outputs = target.decode_batch([best[0].ids for best in hypotheses])
    references = target.decode_batch([reference for _, reference in pairs])
    sources = source.decode_batch([ids for ids, _ in pairs])
    language = data.task.config.target_language
    scores = {"bleu": bleu(outputs, references, language=language), "chrf": chrf(outputs, references)}
    results: dict[str, Any] = {name: score.value for name, score in scores.items()}
    results["exact"] = sum(a == b for a, b in zip(outputs, references, strict=True)) / len(outputs)
    results["signature"] = {name: score.signature for name, score in scores.items()}
    results |= _evaluate_exposure(network, pairs[:EXPOSURE_SAMPLES], target)
    samples = [Sample(source=s, reference=r, output=o) for s, r, o in zip(sources, references, outputs, strict=True)]
    results["mistakes"] = _worst_translations(samples)
    results |= _attention(network, data, [(ids, best[0].ids) for (ids, _), best in zip(pairs, hypotheses, strict=True)])
    return results, samples[:: max(1, len(samples) // SHOWN)][:SHOWN]


def _worst_translations(samples: list[Sample]) -> list[Sample]:
    """The samples with the lowest chrF, worst first."""
    scores = [chrf([sample["output"]], [sample["reference"]]).value for sample in samples]
    order = sorted(range(len(samples)), key=lambda index: scores[index])[:SHOWN]
    return [Sample(**samples[n], mistake=f"chrF {scores[n]:.1f}") for n in order if scores[n] < 99.995]


def _attention(network: EncoderDecoder, data: Data, pairs: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Cross-attention weights of the longest sample that fits a picture: a translation over its source."""
    source, target = data.tokenizers[0], data.tokenizers[-1]
    fitting = [pair for pair in pairs if pair[1] and max(map(len, pair)) <= MAX_DRAWN]
    if not fitting:
        return {}
    ids, output = max(fitting, key=lambda pair: len(pair[0]))
    weights = alignment_weights(network, ids, [target.id("begin")], output).float()
    return {
        "attention": {
            "source": [shown(source, token) for token in ids],
            "target": [shown(target, token) for token in output],
            "weights": [[round(weight, 3) for weight in row] for row in weights.tolist()],
        }
    }


def _evaluate_exposure(
    network: EncoderDecoder, pairs: list[tuple[list[int], list[int]]], target: Tokenizer
) -> dict[str, Any]:
    """Exposure bias, and accuracy by position with teacher forcing and free-running."""
    sources, targets = [ids for ids, _ in pairs], [[target.id("begin"), *reference] for _, reference in pairs]
    device = network.decoder.embedding.tokens.weight.device
    lengths = [torch.tensor([len(row) for row in rows], device=device) for rows in (sources, targets)]
    padded = [pad_batch(rows, device)[0] for rows in (sources, targets)]
    bias = exposure_bias(network, padded[0], lengths[0], padded[1], lengths[1], target.id("end"))
    count = bias.count.clamp(min=1)
    by_position = {
        "teacher_forced": (bias.teacher_forced / count).tolist(),
        "free_running": (bias.free_running / count).tolist(),
    }
    return {"exposure_bias": float(bias.mean), "exposure": by_position}


def _sample_continuations(network: Decoder, data: Data) -> list[Sample]:
    """Sampled continuations of a few validation prompts."""
    assert data.valid is not None
    tokenizer = data.tokenizers[0]
    size = data.valid.num_samples(0)
    prompts = []
    for index in np.linspace(0, size - 1, min(3, size)).astype(np.int64):
        ids = data.valid.batch(np.array([index]), 0, 0)["ids"][0].tolist()
        prompts.append(ids[: max(1, min(32, len(ids) // 2))])
    room = max(1, min(100, network.config.max_positions - max(map(len, prompts)) - 1))
    eos_ids = [tokenizer.roles["end"]] if "end" in tokenizer.roles else []
    settings = GenerationConfig(max_new_tokens=room, temperature=0.8, top_p=0.95)
    continuations = generate(network, prompts, settings, eos_ids=eos_ids)
    return [
        Sample(source=tokenizer.decode(prompt), output=tokenizer.decode(best[0].ids))
        for prompt, best in zip(prompts, continuations, strict=True)
    ]
