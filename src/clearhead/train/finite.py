"""Non-finite gradients: report skipped updates, and stop after several in a row."""

import math

from torch import Tensor

from clearhead.checkpoint import save_tensors
from clearhead.data import GlobalBatch
from clearhead.errors import UserError
from clearhead.train.events import write_event
from clearhead.train.state import RunState

MAX_NONFINITE_STEPS = 3  # skipped updates in a row before training stops


class Diverged(UserError):
    """Training stopped because the gradient was not finite several times in a row."""


def check_finite(run: RunState, skip_last: int = 0) -> None:
    """Check the gradient norms of all unchecked steps but the last `skip_last`."""
    while len(run.unchecked) > skip_last:
        _check_step(run, *run.unchecked.pop(0))


def _check_step(run: RunState, step: int, grad_norm: Tensor, batch: GlobalBatch) -> None:
    if run.updater.scaler is not None and run.updater.scaler.scale > 1:
        return  # fp16 overflows now and then; the loss scale has been lowered
    if math.isfinite(float(grad_norm)):
        run.nonfinite_steps = 0
        return
    run.nonfinite_steps += 1
    write_event(run, {"kind": "note", "step": step, "text": "the gradient is not finite; this update was skipped"})
    run.log(f"step {step}: the gradient is not finite; this update was skipped")
    if run.nonfinite_steps >= MAX_NONFINITE_STEPS:
        file = run.out / f"nonfinite-step-{step}-rank-{run.dist.rank}.safetensors"
        tensors = {f"{n}.{name}": x for n, micro in enumerate(batch.batches) for name, x in micro.tensors.items()}
        save_tensors(file, tensors)
        raise Diverged(
            f"step {step}: the gradient was not finite {run.nonfinite_steps} times in a row; the batch is in {file}; "
            "lower train.lr, raise train.warmup, or set train.precision=fp32"
        )
