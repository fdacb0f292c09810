"""A rehearsal: reads the data, builds the model, does two steps and one validation, and keeps nothing of it."""

import time
from pathlib import Path

import torch

from clearhead.config.recipe import Recipe, dump_recipe
from clearhead.errors import UserError
from clearhead.model.cost import count_parameters
from clearhead.train import validate
from clearhead.train.distributed import dist_context
from clearhead.train.run import Run, Say
from clearhead.train.updater import Progress


def dry_run(recipe: Recipe, say: Say) -> list[str]:
    """The resolved recipe, then parameters, memory and estimated time as comments: lines of YAML.

    Nothing is written but the token cache.
    """
    with dist_context(recipe.train.device) as here:
        run = Run(recipe, Path("dry-run"), here, say, lambda event: None)
        items = run.items()
        spent, tokens = [], 0
        for step in (1, 2):
            item = next(items)
            began = time.perf_counter()
            try:
                float(run.updater.update(item.batches, step, Progress()))  # waits for the device
            except torch.OutOfMemoryError:
                raise UserError("out of memory; set train.grad_accum higher, or data.batch_tokens lower") from None
            spent.append(time.perf_counter() - began)
            tokens += sum(batch.tokens for batch in item.batches)
        count = count_parameters(run.network)
        lines = [dump_recipe(recipe)]
        lines.append(f"# parameters    {count:,}")
        lines.append(f"# memory        {_memory(here.device, count)}")
        lines.append(f"# samples       {run.data.train.size(0):,} an epoch, about {tokens // 2:,} tokens a step")
        if run.data.valid is not None:
            began = time.perf_counter()
            found = validate.losses(run.objective, run.data.valid, recipe.data, here, run.updater.dtype)
            lines.append(f"# validation    loss {found['loss']:.3f} in {time.perf_counter() - began:.1f} s")
        seconds = spent[-1] * recipe.train.steps
        lines.append(f"# time          about {_duration(seconds)} for {recipe.train.steps:,} steps, without validation")
    return lines


def _memory(device: torch.device, count: int) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB at the most"
    return f"{count * 16 / 2**20:,.0f} MiB for weights, gradients and Adam, activations not counted"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
