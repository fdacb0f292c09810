"""How good the model is now: loss, perplexity and accuracy on held-out data, BLEU and chrF of what it writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.data import Data, Dataset, Loader
from clearhead.train.objective import Objective
from clearhead.train.parallel import Place, cast
from clearhead.train.step import Progress

HIGHER = ("bleu", "chrf", "accuracy", "f1", "matthews", "spearman", "exact")  # metrics of which more is better


def better(metric: str, new: float, old: float | None) -> bool:
    """Whether a score beats the best so far; the same is not better."""
    return old is None or math.isnan(old) or (new > old if metric in HIGHER else new < old)


def losses(
    objective: Objective,
    dataset: Dataset,
    data: DataConfig,
    place: Place,
    dtype: torch.dtype,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Mean losses over a data set, without dropout and smoothing; perplexity is of the words."""
    loader = Loader(
        dataset,
        tokens=data.tokens,
        shuffle=False,
        pool=data.pool,
        rank=place.rank,
        processes=place.processes,
        workers=min(data.workers, 1),
    )
    progress = Progress()
    trains = objective.training
    objective.eval()
    try:
        with torch.no_grad():
            for step in loader:
                for batch in step.batches:
                    with cast(place.device, dtype):
                        progress.add(objective(batch.to(place.device)))
                if place.any(stopped()):
                    return {}
    finally:
        objective.train(trains)
    means = progress.means(place)
    main = next(name for name in means if not name.endswith("_accuracy"))
    found = {"loss": means[main], "accuracy": means[f"{main}_accuracy"]}
    if main == "words":
        found["perplexity"] = math.exp(min(means[main], 700))
    for name in means:
        if not name.startswith(main):
            found[name] = means[name]
    return found


def scores(objective: Objective, data: Data, settings: TrainConfig, task: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What the model writes or says for some validation samples: scores, and a few samples to read."""
    if data.valid is None or task not in SCORERS or (task == "translation" and not settings.scored):
        return {}, []
    return SCORERS[task](objective, data, settings)
