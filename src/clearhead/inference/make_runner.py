"""The fastest step for a network."""

from __future__ import annotations

from clearhead.inference.model_runner import GenerativeNetwork
from clearhead.inference.reference_step import ReferenceRunner
from clearhead.inference.step import PagedKVCache, StepRunner


def make_runner(network: GenerativeNetwork, pages: int, max_rows: int) -> StepRunner:
    """Return a runner of a network with a cache of some pages, for at most `max_rows` rows at a time."""
    weight = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    return ReferenceRunner(network, PagedKVCache(network.config, pages, weight.dtype, weight.device), max_rows)
