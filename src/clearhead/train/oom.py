"""Out of memory: split batches into more micro-batches and repeat the step."""

import torch

from clearhead.data import GlobalBatch
from clearhead.errors import UserError
from clearhead.train.events import write_event
from clearhead.train.state import RunState


def split_batches(run: RunState, batch: GlobalBatch) -> None:
    """Double gradient accumulation after an out-of-memory error; the same batch is then loaded again."""
    if run.dist.world_size > 1:
        raise UserError("out of memory; raise train.grad_accum: it cannot change during a run of several processes")
    if len(batch.plan.samples) <= run.grad_accum:
        raise UserError(
            "out of memory with one sample; lower data.max_length, or set train.activation_checkpointing=true"
        )
    run.updater.optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    run.grad_accum *= 2
    text = f"out of memory: batches are now split into {run.grad_accum} micro-batches; the update is the same"
    write_event(run, {"kind": "note", "step": run.step, "text": text})
    run.log(text)
