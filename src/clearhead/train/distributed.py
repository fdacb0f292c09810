"""Processes, devices, precision, compilation, activation checkpointing and data parallelism, applied to a model."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.errors import UserError
from clearhead.model import Network
from clearhead.ops.cross_entropy import cross_entropy_chunk
from clearhead.ops.device import choose_device
from clearhead.ops.malloc import tune_malloc
from clearhead.ops.triton.cross_entropy import triton_cross_entropy_chunk, triton_cross_entropy_supports
from clearhead.train.objective import Objective

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class DistContext:
    """The device, rank and world size of this process."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce: sum values over all processes, float64 on the CPU in and out."""
        if self.world_size == 1:
            return values
        total = values.to(self.device)
        distributed.all_reduce(total)
        return total.cpu()

    def barrier(self) -> None:
        """Wait for all processes, for instance before reading what one of them wrote."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all processes get the same answer."""
        return flag if self.world_size == 1 else bool(self.sum(torch.tensor([float(flag)], dtype=torch.float64))[0])


@contextlib.contextmanager
def dist_context(device: str) -> Iterator[DistContext]:
    """Set up this process: alone, or in the process group that torchrun describes in the environment."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if chosen.type == "cuda":  # CUDA graphs, seeds and Triton kernels use the current device
        torch.cuda.set_device(chosen)
    if world_size == 1:
        yield DistContext(chosen)
        return
    distributed.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield DistContext(chosen, rank, world_size)
    finally:
        distributed.destroy_process_group()


def compute_dtype(settings: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of matmuls."""
    if settings.precision != "auto":
        return DTYPES[settings.precision]
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Return torch.autocast for bf16 and fp16; a no-op for fp32 and fp64."""
    if dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(device.type, dtype)
    return contextlib.nullcontext()


def apply_compile(objective: Objective, settings: TrainConfig, dist: DistContext) -> None:
    """Apply activation checkpointing and torch.compile module by module; parameter names stay the same."""
    stacks, device = network_stacks(objective.network), dist.device
    if device.type == "cpu":
        tune_malloc()
    # Without static shapes nearly every batch has its own; compile one kernel for all of them.
    dynamic = None if has_static_shapes(objective.data) else True
    if settings.activation_checkpointing:
        for layer in (layer for stack in stacks for layer in stack.layers):
            layer.forward = _checkpointed(layer.forward)
    dtype = compute_dtype(settings, device)
    if is_compiled(settings, device):
        if device.type == "cpu":
            _check_compiler()
        for module in _modules_to_compile(objective, settings, dist):
            module.compile(dynamic=dynamic)
        objective.chunk_fn = (
            triton_cross_entropy_chunk
            if triton_cross_entropy_supports(device, dtype)
            else torch.compile(cross_entropy_chunk, dynamic=dynamic)
        )
    if device.type == "cuda" and dtype == torch.bfloat16:
        # Activations between blocks in bf16 take half the memory; norms and sums inside blocks are fp32 anyway.
        for module in (module for stack in stacks for module in (stack.embedding, *stack.layers, stack.norm)):
            if module is not None:
                module.register_forward_hook(
                    lambda module, inputs, output: output.to(dtype) if torch.is_autocast_enabled("cuda") else output
                )


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keep only the inputs; recompute activations in backward."""

    def run(*inputs: Any, **named: Any) -> Any:  # a function, as torch.compile does not trace a partial of `checkpoint`
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    return run


def _check_compiler() -> None:
    """Raise if there is no C++ compiler, which torch.compile needs for CPU kernels."""
    from torch._inductor import config  # takes a second to import

    compilers = [name for name in config.cpp.cxx if name]
    if not any(shutil.which(name) for name in compilers):
        names = " or ".join(compilers) or "g++"
        raise UserError(f"train.compile: there is no C++ compiler ({names}); install one, or use train.compile=off")


def _modules_to_compile(objective: Objective, settings: TrainConfig, dist: DistContext) -> list[nn.Module]:
    """Layers, which share one compiled kernel set, plus embedding and final norm where batches have one shape.

    With compile=whole, whole stacks instead, which fuses the end of a layer with the start of the next.
    """
    stacks = network_stacks(objective.network)
    layers = [layer for stack in stacks for layer in stack.layers]
    if dist.world_size > 1:  # a layer is the unit of communication
        return layers
    if settings.compile == "whole":
        return stacks
    ends = [module for stack in stacks for module in (stack.embedding, stack.norm) if module is not None]
    return layers + ends if has_static_shapes(objective.data) else layers


def has_static_shapes(data: DataConfig) -> bool:
    """Whether all batches have the same shape."""
    return data.task == "language-model" and not data.isolate_documents and not data.packed


@contextlib.contextmanager
def uncompiled(network: Network) -> Iterator[None]:
    """Run the network eagerly, for validation: its shapes differ, and each would be compiled."""
    before = {module: module._compiled_call_impl for module in network.modules()}
    for module in before:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, compiled in before.items():
            module._compiled_call_impl = compiled


def network_stacks(network: Network) -> list[Any]:
    """Return the network's encoder and decoder, where it has them."""
    return [stack for name in ("encoder", "decoder") if (stack := getattr(network, name, None)) is not None]


def is_compiled(settings: TrainConfig, device: torch.device) -> bool:
    """Whether the settings ask for torch.compile on this device."""
    return settings.compile in ("on", "whole") or (settings.compile == "auto" and device.type == "cuda")


def wrap_parallel(objective: nn.Module, network: Network, settings: TrainConfig, dist: DistContext) -> nn.Module:
    """Wrap the objective for several processes: replicated (DDP) or sharded (FSDP2)."""
    if dist.world_size == 1:
        return objective
    if settings.parallel == "ddp":
        return nn.parallel.DistributedDataParallel(objective)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(dist.device.type, (dist.world_size,))
    for layer in (layer for stack in network_stacks(network) for layer in stack.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective
