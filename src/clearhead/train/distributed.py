"""Speed and scale, put on from outside: devices, precision, compiled blocks, recomputed activations, many processes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.errors import UserError
from clearhead.model import Network
from clearhead.ops.cross_entropy import cross_entropy_chunk
from clearhead.ops.device import choose_device
from clearhead.ops.malloc import tune_malloc
from clearhead.ops.triton.cross_entropy import kernel_supports, triton_cross_entropy_chunk
from clearhead.train.objective import Objective
from clearhead.train.training_layers import fuse

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class DistContext:
    """Which process this is, of how many, on which device."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def sum(self, numbers: Tensor) -> Tensor:
        """Numbers added up over all processes, float64 on the CPU in and out."""
        if self.world_size == 1:
            return numbers
        found = numbers.to(self.device)
        dist.all_reduce(found)
        return found.cpu()

    def barrier(self) -> None:
        """Until all processes are here: what one of them wrote, the others may read now."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process; all of them learn it."""
        return flag if self.world_size == 1 else bool(self.sum(torch.tensor([float(flag)], dtype=torch.float64))[0])


@contextlib.contextmanager
def dist_context(device: str) -> Iterator[DistContext]:
    """This process's place: alone, or as torchrun says in the environment."""
    processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    chosen = choose_device(device, local)
    if chosen.type == "cuda":  # the one that seeds, recordings and kernels of our own are for
        torch.cuda.set_device(chosen)
    if processes == 1:
        yield DistContext(chosen)
        return
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield DistContext(chosen, rank, processes)
    finally:
        dist.destroy_process_group()


def precision(settings: TrainConfig, device: torch.device) -> torch.dtype:
    """What matrix products are computed in."""
    if settings.precision != "auto":
        return DTYPES[settings.precision]
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Matrix products in half precision, sums and weights in fp32; nothing to do for fp32 and fp64."""
    if dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(device.type, dtype)
    return contextlib.nullcontext()


def apply_compile(objective: Objective, settings: TrainConfig, place: DistContext) -> None:
    """Hold memory, recompute activations and compile, part by part; the names of parameters stay as they are."""
    stacks, device = stacks(objective.network), place.device
    if device.type == "cpu":
        tune_malloc()
    # Windows of a text are all of one shape. Elsewhere nearly every batch has its own: one kernel for all of them.
    varied = None if same_shapes(objective.data) else True
    if settings.activation_checkpointing:
        for layer in (layer for stack in stacks for layer in stack.layers):
            layer.forward = _recomputed(layer.forward)
    dtype = precision(settings, device)
    if compiles(settings, device):
        if device.type == "cpu":
            _check_compiler()
        else:
            fuse(objective.network)
        for part in _to_compile(objective, settings, place):
            part.compile(dynamic=varied)
        objective.piece = (
            triton_cross_entropy_chunk
            if kernel_supports(device, dtype)
            else torch.compile(cross_entropy_chunk, dynamic=varied)
        )
    if device.type == "cuda" and dtype == torch.bfloat16:
        # What passes between blocks is half as large; norms and sums inside them are fp32 all the same.
        for part in (part for stack in stacks for part in (stack.embedding, *stack.layers, stack.norm)):
            if part is not None:
                part.register_forward_hook(
                    lambda module, inputs, output: output.to(dtype) if torch.is_autocast_enabled("cuda") else output
                )


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps what goes in; for the gradient, what came out of it is computed again."""

    def run(*inputs: Any, **named: Any) -> Any:  # torch.compile enters it, and not a partial of `checkpoint`
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    return run


def _check_compiler() -> None:
    """A CPU's kernels are written in C++, which something must compile."""
    from torch._inductor import config  # a second to import

    wanted = [name for name in config.cpp.cxx if name]
    if not any(shutil.which(name) for name in wanted):
        names = " or ".join(wanted) or "g++"
        raise UserError(f"train.compile: there is no C++ compiler ({names}); install one, or use train.compile=off")


def _to_compile(objective: Objective, settings: TrainConfig, place: DistContext) -> list[nn.Module]:
    """Blocks, which are alike, so that one is compiled for all, and what stands before and behind them where batches
    have one shape; or whole stacks, in which what ends a block and what begins the next are one kernel."""
    stacks = stacks(objective.network)
    layers = [layer for stack in stacks for layer in stack.layers]
    if place.world_size > 1:  # each layer is a unit that processes exchange
        return layers
    if settings.compile == "whole":
        return stacks
    ends = [part for stack in stacks for part in (stack.embedding, stack.norm) if part is not None]
    return layers + ends if same_shapes(objective.data) else layers


def same_shapes(data: DataConfig) -> bool:
    """Whether all batches of a data set have one shape."""
    return data.task == "language-model" and not data.isolate_documents and not data.packed


@contextlib.contextmanager
def uncompiled(network: Network) -> Iterator[None]:
    """Blocks run as they are written: validation sees other shapes than training, each of which would be compiled."""
    before = {part: part._compiled_call_impl for part in network.modules()}
    for part in before:
        part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, compiled in before.items():
            part._compiled_call_impl = compiled


def stacks(network: Network) -> list[Any]:
    """The network's encoder and decoder, as far as it has them."""
    return [stack for name in ("encoder", "decoder") if (stack := getattr(network, name, None)) is not None]


def compiles(settings: TrainConfig, device: torch.device) -> bool:
    """Whether blocks are compiled."""
    return settings.compile in ("on", "whole") or (settings.compile == "auto" and device.type == "cuda")


def wrap_parallel(objective: nn.Module, network: Network, settings: TrainConfig, place: DistContext) -> nn.Module:
    """The objective over all processes: whole in each (DDP), or sharded over them (FSDP2)."""
    if place.world_size == 1:
        return objective
    if settings.parallel == "ddp":
        return nn.parallel.DistributedDataParallel(objective)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(place.device.type, (place.world_size,))
    for layer in (layer for stack in stacks(network) for layer in stack.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective
