"""Random seeds of an update, label smoothing in training and validation, and the loss scaler."""

from itertools import product
from typing import Any

import pytest
import torch

from clearhead.config import preset
from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.data import Batch
from clearhead.model import build
from clearhead.train import losses as loss_functions
from clearhead.train.distributed import DistContext
from clearhead.train.losses import Loss
from clearhead.train.objective import Objective
from clearhead.train.optimizer import build_optimizer
from clearhead.train.updater import LossScaler, Metrics, Updater
from clearhead.train.validate import evaluate_losses
from tests.train.tiny import prepared, recipe

IDS = torch.arange(24).reshape(2, 12) % 19 + 1
BATCH = Batch({"ids": IDS, "labels": IDS.roll(-1, 1)}, 24)


def updater_of(rank: int = 0, **settings: Any) -> Updater:
    """A tiny GPT with dropout and constant initial weights, as one process of the given rank."""
    torch.manual_seed(0)
    sizes = ["vocab_size=20", "dim=8", "heads=2", "ff_dim=12", "max_positions=16", "dropout=0.5"]
    network, train = build(preset("tiny-gpt", sizes)), TrainConfig(steps=5, lr=1e-30, **settings)
    objective = Objective(network, DataConfig(task="language-model", max_length=16, batch_tokens=64), train).train()
    dist = DistContext(torch.device("cpu"), rank)  # world size 1: nothing to synchronize
    return Updater(objective, objective, build_optimizer(network, train), train, dist, torch.float32)


def micro_batch_losses(updater: Updater, step: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The losses of an update with the same micro-batch three times."""
    losses: list[float] = []
    inner = updater.forward_backward

    def recorded(*args: Any) -> dict[str, Loss]:
        result = inner(*args)
        losses.append(float(result["lm"].total))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(updater, "forward_backward", recorded)
        updater.update((BATCH, BATCH, BATCH), step, Metrics())
    return losses


def test_seeds_differ_by_step_micro_batch_and_rank() -> None:
    seeds = [updater_of(rank).seed(step, micro) for rank, step, micro in product(range(3), range(1, 4), range(3))]
    assert len(set(seeds)) == 27
    assert updater_of().seed(1) == updater_of().seed(1, 0) == seeds[0]
    assert updater_of(seed=1).seed(1) not in seeds


def test_dropout_differs_between_micro_batches_steps_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [((0, 1), updater_of(0)), ((0, 2), updater_of(0)), ((1, 1), updater_of(1))]
    values = {key: micro_batch_losses(updater, key[1], monkeypatch) for key, updater in runs}
    assert len({loss for losses in values.values() for loss in losses}) == 9
    assert micro_batch_losses(updater_of(1), 1, monkeypatch) == values[1, 1], "and depends on nothing else"


@pytest.mark.parametrize("family", ["translator", "bert", "gpt"])
def test_validation_has_no_label_smoothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []
    lm_loss = loss_functions.lm_loss

    def recorded(hidden: Any, head: Any, labels: Any, label_smoothing: float, **options: Any) -> Loss:
        loss = lm_loss(hidden, head, labels, label_smoothing, **options)
        assert bool(loss.total == loss.unsmoothed) == (label_smoothing == 0)
        used.append(label_smoothing)
        return loss

    made = recipe(family, label_smoothing=0.3)
    data, network = prepared(made)
    assert data.valid is not None
    objective = Objective(network, made.data, made.train).train()
    monkeypatch.setattr(loss_functions, "lm_loss", recorded)
    dist = DistContext(torch.device("cpu"))
    smoothed = evaluate_losses(objective, data.valid, made.data, dist, torch.float32)
    assert set(used) == {0.0}
    assert objective.training
    objective(data.train.batch(torch.arange(3).numpy(), 0, 0))
    assert used[-1] == 0.3, "training has it"
    plain = Objective(network, made.data, made.train.model_copy(update={"label_smoothing": 0.0})).train()
    assert evaluate_losses(plain, data.valid, made.data, dist, torch.float32) == smoothed


def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=2)
    scales = []
    for finite in (True, False, True, True, True, False):
        scaler.update(finite)
        scales.append((scaler.scale, scaler.steps))
    assert scales == [(8, 1), (4, 0), (4, 1), (8, 0), (8, 1), (4, 0)]
