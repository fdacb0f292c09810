"""The state of a training run: data, network, optimizer, progress, and its folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.config.recipe import Recipe
from clearhead.config.train import TrainConfig
from clearhead.data import Batch, Data, GlobalBatch, Loader, Position, prepare
from clearhead.model import Network
from clearhead.train.cuda_graph import capture_steps
from clearhead.train.distributed import DistContext, apply_compile, compute_dtype, wrap_parallel
from clearhead.train.init_from import (
    class_weights,
    fit_to_initial_model,
    inherited,
    init_network,
    load_initial_model,
    pretrained_weights,
    tokenizers_for,
)
from clearhead.train.lora import Lora, apply_lora
from clearhead.train.objective import Objective
from clearhead.train.optimizer import build_optimizer, freeze
from clearhead.train.run_log import RunLog
from clearhead.train.updater import LossScaler, Metrics, Updater

Event = dict[str, Any]
Log = Callable[[str], None]
OnEvent = Callable[[Event], None]


@dataclass
class RunState:
    """A training run. Its folder `out` is not created before the first step is done."""

    recipe: Recipe
    out: Path
    dist: DistContext
    log: Log  # status messages
    on_event: OnEvent  # events of the run log

    data: Data
    network: Network
    objective: Objective
    updater: Updater
    update: Callable[[tuple[Batch, ...], int, Metrics], Tensor]  # updater.update, or its CUDA graph form
    lora: Lora | None
    inherited: dict[str, Any]  # keys of config.json

    # Progress, saved in checkpoints
    grad_accum: int  # micro-batches per step; doubled when memory runs out
    step: int = 0
    position: Position = field(default_factory=Position)  # in the data
    metrics: Metrics = field(default_factory=Metrics)  # since the last log line
    best: float | None = None
    validations_since_best: int = 0
    validation_pending: bool = False  # due, but interrupted by a stop
    extra_checkpoint: int | None = None  # step of one that a stop saved between two regular ones, to be deleted

    # The last step, validation and checkpoint
    batch: GlobalBatch | None = None
    grad_norm: Tensor | None = None
    unchecked: list[tuple[int, Tensor, GlobalBatch]] = field(default_factory=list)  # steps before `check_finite`
    nonfinite_steps: int = 0  # skipped updates in a row
    validation: Event = field(default_factory=dict)
    saved_step: int = 0

    # Clocks and files
    start_time: float = field(default_factory=time.perf_counter)
    log_time: float = field(default_factory=time.perf_counter)  # of the last log line
    run_log: RunLog | None = None
    lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    locked: bool = False

    @property
    def settings(self) -> TrainConfig:
        """The training settings."""
        return self.recipe.train

    @property
    def done(self) -> bool:
        """Whether all steps are done or patience has run out."""
        patience = self.settings.patience
        return self.step >= self.settings.steps or (patience is not None and self.validations_since_best >= patience)

    def due(self, every: int) -> bool:
        """Whether this step is a multiple of `every`, or the last."""
        return self.step % every == 0 or self.step == self.settings.steps


def setup(recipe: Recipe, out: Path, dist: DistContext, log: Log, on_event: OnEvent) -> RunState:
    """Load the data, build network and optimizer, and apply precision, compilation and parallelism."""
    settings = recipe.train
    log = log if dist.is_main else lambda line: None
    initial = load_initial_model(recipe)
    recipe = fit_to_initial_model(recipe, initial)
    data = prepare(recipe.data, tokenizers_for(recipe, initial), log=log)
    network = init_network(recipe, data, initial)
    lora = None
    if settings.lora is not None and initial is not None:
        fresh = network.state_dict().keys() - pretrained_weights(recipe, data, initial, network).keys()
        lora = apply_lora(network, settings.lora, initial, str(recipe.model["init_from"]), sorted(fresh))
    if settings.freeze:
        freeze(network, settings.freeze)
    dtype = compute_dtype(settings, dist.device)
    network.to(dist.device, torch.float64 if dtype == torch.float64 else torch.float32)
    objective = Objective(network, recipe.data, settings, class_weights(recipe, data)).to(dist.device).train()
    apply_compile(objective, settings, dist)
    parallel_objective = wrap_parallel(objective, network, settings, dist)
    scaler = LossScaler() if dtype == torch.float16 else None
    optimizer = build_optimizer(network, settings)
    updater = Updater(objective, parallel_objective, optimizer, settings, dist, dtype, scaler)
    update = capture_steps(updater).update
    return RunState(
        recipe,
        out,
        dist,
        log,
        on_event,
        data,
        network,
        objective,
        updater,
        update,
        lora,
        inherited(recipe, initial),
        settings.grad_accum,
    )


def global_batches(run: RunState) -> Iterator[GlobalBatch]:
    """This process's part of the global batches, from the run's position on."""
    config = run.recipe.data
    return iter(
        Loader(
            run.data.train,
            batch_tokens=config.batch_tokens,
            seed=run.settings.seed,
            bucket_size=config.bucket_size,
            position=run.position,
            rank=run.dist.rank,
            world_size=run.dist.world_size,
            grad_accum=run.grad_accum,
            workers=config.workers,
            pin_memory=run.dist.device.type == "cuda",
        )
    )
