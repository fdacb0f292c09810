"""The contract of a decode step: one new token for every row of a batch, over a paged KV cache.

R rows · P pages · G key-value heads · C slots of a page · E head dim · V vocabulary

The engine describes a step in host arrays (`StepInputs`, `SamplingInputs`) and a `StepRunner` computes it: eagerly over
the reference network, in one native call on a CPU, or as a captured CUDA graph. All of them choose the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.config import ModelConfig


class PagedKVCache:
    """Keys and values of all rows in one pool of pages; block tables say which pages belong to a row.

    Slot p of a row is in page `block_table[p // page_size]` at offset `p % page_size`. The cross-attention keys and
    values of a source are in pages of the same pool, which a source table lists; a page belongs to one of the two.
    """

    def __init__(self, config: ModelConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device):
        self.pages, self.page_size, self.dtype, self.device = pages, page_size, dtype, device
        shape = (pages, config.kv_heads, page_size, config.head_dim)  # (P, G, C, E), one tensor per decoder layer
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.decoder_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.decoder_layers)]


@dataclass
class StepInputs:
    """One new token for each of R rows."""

    ids: NDArray[np.int64]  # (R,) the token to process, where `carry` is -1
    carry: NDArray[np.int32]  # (R,) row of the previous step whose chosen token is processed, or -1
    positions: NDArray[np.int32]  # (R,) cached tokens of the row: position and slot of the new token
    block_tables: NDArray[np.int32]  # (R, B) page ids; entries beyond the row's pages are ignored
    source_tables: NDArray[np.int32] | None = None  # (R, B') page ids of the source, of a translator
    source_lengths: NDArray[np.int32] | None = None  # (R,) tokens of the source


@dataclass
class SamplingInputs:
    """How the next token of each of R rows is chosen from its logits; temperature 0 is greedy."""

    temperature: NDArray[np.float32]  # (R,)
    top_k: NDArray[np.int32]  # (R,) 0: off
    top_p: NDArray[np.float32]  # (R,) 1: off
    min_p: NDArray[np.float32]  # (R,) 0: off
    repetition_penalty: NDArray[np.float32]  # (R,) 1: off
    presence_penalty: NDArray[np.float32]  # (R,) 0: off
    seeds: NDArray[np.int64]  # (R,)
    num_new: NDArray[np.int64]  # (R,) tokens that the row has generated so far
    slots: NDArray[np.int32]  # (R,) a number that the row keeps while it runs: its place in tables of seen tokens
    logprobs: bool = False  # whether any row needs them


class StepOutput(NamedTuple):
    """The chosen tokens of a step, on the host."""

    tokens: list[int]  # (R,)
    logprobs: list[float] | None  # (R,) of the unprocessed logits
    finite: list[bool]  # (R,) False where the logits had NaN or only -inf: the row fails, the others go on


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> StepOutput:
        """Wait for the step."""


class DecodeStep(Protocol):
    """A step of a network: write the new keys and values to the cache, return logits (R, V) in fp32."""

    def __call__(self, ids: Tensor, inputs: StepInputs, cache: PagedKVCache) -> Tensor: ...


class StepRunner(Protocol):
    """Run steps one after another; `launch` may return before the step is done."""

    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> StepHandle:
        """Start a step; a second one may be started before the result of the first is read."""

    def logits(self, inputs: StepInputs) -> Tensor:
        """Run a step without choosing tokens: logits (R, V) in fp32 (beam search, draft verification, processors)."""
