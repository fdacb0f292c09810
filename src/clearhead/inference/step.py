"""The contract of an inference step: new tokens of several rows, over a paged KV cache.

N tokens · R rows · M outputs · B table entries of a row · G key-value heads · E head dim · V vocabulary

The engine describes a step in host arrays (`StepInputs`, `SamplingInputs`) and a `StepRunner` computes it: eagerly over
the reference network, in one native call on a CPU, or as a captured CUDA graph. All of them choose the same tokens.
A decode step has one token per row; a row with several tokens is a chunk of its prompt, or draft tokens to verify.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.config import ModelConfig

PAGE_SIZE = 16  # slots of a page
SCRATCH_PAGE = 0  # never allocated: padding of a captured step is written there
LAST_TOKEN = -1  # as an id: the token that the row's last step chose, which the host may not know yet


class PagedKVCache:
    """Keys and values of all rows in one pool of slots; a page is PAGE_SIZE slots, and slot 0 starts page 0.

    The cross-attention keys and values of a source are in pages of the same pool; a page belongs to one of the two.
    """

    def __init__(self, config: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device):
        self.config, self.pages, self.dtype, self.device = config, pages, dtype, device
        shape = (pages * PAGE_SIZE, config.kv_heads, config.head_dim)  # (slots, G, E), one tensor per decoder layer
        self.keys = [_zeros(shape, dtype, device) for _ in range(config.decoder_layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(config.decoder_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU in a mapping, which takes no memory for pages until they are written and gives it back."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **flags)
    except OSError as error:  # no memory
        raise MemoryError(str(error)) from None
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass
class StepInputs:
    """N tokens of R rows; the tokens of a row are neighbors, in the order of their positions.

    All new keys and values are written before attention, so a token sees the earlier ones of its row in this step.
    Entry i of a row's table is a page (`span` PAGE_SIZE) or a slot (`span` 1, for beams, whose paths share slots):
    position p of the row is cached at slot `table[p // span] * span + p % span`.
    """

    ids: NDArray[np.int32]  # (N,) or LAST_TOKEN
    rows: NDArray[np.int32]  # (N,) index into the arrays below
    positions: NDArray[np.int32]  # (N,) a token attends to positions 0 to its own
    slots: NDArray[np.int32]  # (N,) where its keys and values are written
    outputs: NDArray[np.int32]  # (M,) the tokens whose logits are wanted
    numbers: NDArray[np.int32]  # (R,) a number below the runner's `max_rows` that a row keeps while it runs
    table: NDArray[np.int32]  # (R, B)
    span: int = PAGE_SIZE
    source_table: NDArray[np.int32] | None = None  # (R, B') pages of the source, of a translator
    source_lengths: NDArray[np.int32] | None = None  # (R,)

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return len(self.ids) == len(self.numbers)


@dataclass
class EncodeInputs:
    """Sources of a translator, whose cross-attention keys and values go to the slots of their pages."""

    ids: Sequence[Sequence[int]]
    tables: Sequence[Sequence[int]] | NDArray[np.int32]  # pages of each source; more entries than it needs are ignored


@dataclass
class SamplingInputs:
    """How a token is chosen from each of M logits; temperature 0 is greedy."""

    numbers: NDArray[np.int32]  # (M,) row numbers, for the last chosen token and the tokens seen so far
    temperature: NDArray[np.float32]  # (M,)
    top_k: NDArray[np.int32]  # (M,) 0: off
    top_p: NDArray[np.float32]  # (M,) 1: off
    min_p: NDArray[np.float32]  # (M,) 0: off
    repetition_penalty: NDArray[np.float32]  # (M,) 1: off; counts the prompt
    presence_penalty: NDArray[np.float32]  # (M,) 0: off; counts new tokens only
    frequency_penalty: NDArray[np.float32]  # (M,) 0: off; counts new tokens only
    seeds: NDArray[np.int64]  # (M,)
    num_new: NDArray[np.int64]  # (M,) tokens that the row has generated so far
    logprobs: int = -1  # -1: not wanted; 0: of the chosen token; n: and of the n most likely ones


class StepOutput(NamedTuple):
    """The chosen tokens of a step, on the host."""

    tokens: list[int]  # (M,)
    finite: list[bool]  # (M,) False where the logits had NaN or only -inf: the row fails, the others go on
    logprobs: list[float] | None = None  # (M,) of the logits before penalties and temperature
    top_tokens: list[list[int]] | None = None  # (M, n)
    top_logprobs: list[list[float]] | None = None  # (M, n)


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> StepOutput:
        """Wait for the step."""


class StepRunner(Protocol):
    """Run steps of one network, one after another."""

    cache: PagedKVCache
    max_rows: int
    asynchronous: bool  # whether `launch` returns before the step is done, so that the host may stay a step behind

    def start_row(self, number: int, prompt: list[int], new: list[int]) -> None:
        """Give a row number to a row with penalties, which count its prompt and, if it is resumed, its new tokens."""

    def encode(self, inputs: EncodeInputs) -> None:
        """Run the encoder, and write the cross-attention keys and values of every decoder layer."""

    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> StepHandle:
        """Run a step and choose a token for each output; the next step may start before the result is read."""

    def logits(self, inputs: StepInputs) -> Tensor:
        """Run a step without choosing: logits (M, V) in fp32 (beam search, draft verification, constraints).

        The caller may change them; the next step may overwrite them.
        """

    def choose(self, logits: Tensor, sampling: SamplingInputs) -> StepOutput:
        """Choose tokens from logits (M, V) that were changed on the way."""

    def copy_slots(self, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copy keys and values of all layers between slots (copy-on-write of shared pages)."""
