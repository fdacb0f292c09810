"""The fastest step for a network."""

from __future__ import annotations

import torch

from clearhead.inference.model_runner import GenerativeNetwork
from clearhead.inference.native_network import NativeNetwork, native_refuses
from clearhead.inference.native_step import NativeRunner
from clearhead.inference.reference_step import ReferenceRunner
from clearhead.inference.step import PAGE_SIZE, PagedKVCache, StepRunner
from clearhead.model import Network
from clearhead.model.cost import cache_bytes

CPU_CACHE_BYTES, GPU_CACHE_BYTES = 1 << 30, 1 << 34  # of the default KV cache
MAX_CACHE_TOKENS = 1 << 18  # of small models
HALF_DTYPES = (torch.bfloat16, torch.float16)
StepNetwork = GenerativeNetwork | NativeNetwork  # what a runner runs


def pack_for_steps(network: Network, dtype: torch.dtype | None) -> NativeNetwork | None:
    """Return the network packed for native steps in a dtype; None if they cannot run it.

    Without a dtype, a CPU computes in fp32 instead of bf16 or fp16, as in `optimize_for_inference`.
    """
    if dtype is None and next(network.parameters()).dtype in HALF_DTYPES:
        dtype = torch.float32
    return None if native_refuses(network, dtype) else NativeNetwork(network, dtype)  # type: ignore[arg-type]


def make_runner(network: StepNetwork, pages: int, max_rows: int) -> StepRunner:
    """Return a runner of a network with a cache of some pages, for at most `max_rows` rows at a time."""
    if isinstance(network, NativeNetwork):
        return NativeRunner(network, pages, max_rows)
    weight = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    return ReferenceRunner(network, PagedKVCache(network.config, pages, weight.dtype, weight.device), max_rows)


def default_cache_tokens(network: StepNetwork) -> int:
    """Return how many tokens fit into the memory of the default KV cache, at least one text of the full length."""
    config, on_gpu = network.config, not isinstance(network, NativeNetwork) and not next(network.parameters()).is_cpu
    memory = GPU_CACHE_BYTES if on_gpu else CPU_CACHE_BYTES
    texts = 2 if config.family == "encoder-decoder" else 1  # of a translator, also the source
    return max(min(memory // cache_bytes(config, 1), MAX_CACHE_TOKENS), texts * config.max_positions + PAGE_SIZE)
