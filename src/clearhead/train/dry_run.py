"""Dry run: load the data, build the model, do two steps and one validation; write nothing but the token cache."""

import time
from pathlib import Path

import torch

from clearhead.config.recipe import Recipe, dump_recipe
from clearhead.errors import UserError
from clearhead.model.cost import count_parameters
from clearhead.train.distributed import dist_context
from clearhead.train.state import Log, global_batches, setup
from clearhead.train.updater import Metrics
from clearhead.train.validate import evaluate_losses


def dry_run(recipe: Recipe, log: Log) -> list[str]:
    """Return the resolved recipe, then parameters, memory and estimated time as comments: lines of YAML."""
    with dist_context(recipe.train.device) as dist:
        run = setup(recipe, Path("dry-run"), dist, log, lambda event: None)
        batches = global_batches(run)
        seconds, tokens = [], 0
        for step in (1, 2):
            batch = next(batches)
            start = time.perf_counter()
            try:
                float(run.updater.update(batch.batches, step, Metrics()))  # waits for the device
            except torch.OutOfMemoryError:
                raise UserError("out of memory; raise train.grad_accum, or lower data.batch_tokens") from None
            seconds.append(time.perf_counter() - start)
            tokens += sum(micro.num_tokens for micro in batch.batches)
        parameters = count_parameters(run.network)
        lines = [dump_recipe(run.recipe)]
        lines.append(f"# parameters    {parameters:,}")
        lines.append(f"# memory        {_memory(dist.device, parameters)}")
        lines.append(
            f"# samples       {run.data.train.num_samples(0):,} per epoch, about {tokens // 2:,} tokens per step"
        )
        if run.data.valid is not None:
            start = time.perf_counter()
            losses = evaluate_losses(run.objective, run.data.valid, run.recipe.data, dist, run.updater.dtype)
            lines.append(f"# validation    loss {losses['loss']:.3f} in {time.perf_counter() - start:.1f} s")
        total = _duration(seconds[-1] * recipe.train.steps)
        lines.append(f"# time          about {total} for {recipe.train.steps:,} steps, without validation")
    return lines


def _memory(device: torch.device, parameters: int) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB peak"
    return f"{parameters * 16 / 2**20:,.0f} MiB for weights, gradients and optimizer state, without activations"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
