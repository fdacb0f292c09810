"""The native step: all layers and the choice of a token in one call of the C library, without the GIL, on a CPU.

N tokens · R rows · M outputs · G key-value heads · E head dim · D model dim · V vocabulary
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from clearhead.inference.native_network import NativeNetwork, layer_structs
from clearhead.inference.sampling import SamplingTensors, TokenCounts, choose_tokens, sampling_features
from clearhead.inference.step import (
    LAST_TOKEN,
    PAGE_SIZE,
    EncodeInputs,
    PagedKVCache,
    SamplingInputs,
    StepInputs,
    StepOutput,
)
from clearhead.ops.native.structs import LANES, LayerStruct, NetworkStruct, StepStruct, check, level, step_library

ENCODE_TOKENS = 4096  # of one call: bounds the memory of the encoder's keys and values
CPU = torch.device("cpu")


@dataclass
class FinishedStep:
    """A step whose tokens are chosen already."""

    output: StepOutput

    def result(self) -> StepOutput:
        """Return the tokens."""
        return self.output


class Workspace:
    """The buffer of a step's intermediate results; it grows with the largest step."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def run(self, network: NetworkStruct, step: StepStruct) -> None:
        """Run a step."""
        lib, threads = step_library(), torch.get_num_threads()
        assert lib is not None
        pointers = (ctypes.byref(network), ctypes.byref(step))
        size = lib.clearhead_step_workspace(*pointers, threads)
        if size > len(self.buffer):
            self.buffer = torch.empty(size, dtype=torch.uint8)
        step.workspace, step.workspace_size = self.buffer.data_ptr(), len(self.buffer)
        check(lib.clearhead_step(*pointers, level(), threads))


class NativeRunner:
    """A StepRunner over packed weights."""

    asynchronous = False

    def __init__(self, network: NativeNetwork, pages: int, max_rows: int):
        self.network, self.max_rows = network, max_rows
        self.cache = PagedKVCache(network.config, pages, network.cache_dtype, CPU)
        self.vocab_size = network.config.target_vocab
        self.last_tokens = np.zeros(max_rows, np.int32)
        self.counts: TokenCounts | None = None  # once a row has penalties
        self.workspace = Workspace()
        self.logits_buffer = torch.empty(0)  # of all steps: touching new memory may take as long as the lm_head
        self.decoder = NetworkStruct.from_buffer_copy(network.decoder)  # with this runner's cache
        self.layers = (LayerStruct * self.decoder.num_layers)(*layer_structs(network.decoder))
        for layer, keys, values in zip(self.layers, self.cache.keys, self.cache.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self.decoder.layers = ctypes.cast(self.layers, ctypes.c_void_p).value
        self.decoder.slots = pages * PAGE_SIZE

    def start_row(self, number: int, prompt: list[int], new: list[int]) -> None:
        """Count the tokens of a row with penalties."""
        if self.counts is None:
            self.counts = TokenCounts(self.max_rows, self.vocab_size, CPU)
        self.counts.start(number, prompt, new)

    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> FinishedStep:
        """Run a step and choose a token for each output."""
        greedy, _, penalties = sampling_features(sampling)
        if not greedy or penalties or sampling.logprobs >= 0:
            return FinishedStep(self.choose(self.logits(inputs), sampling))
        tokens = np.empty(len(inputs.outputs), np.int32)
        self._run(inputs, tokens)
        finite = tokens >= 0
        tokens = np.maximum(tokens, 0)
        self.last_tokens[sampling.numbers] = tokens
        return FinishedStep(StepOutput(tokens.tolist(), finite.tolist()))

    def logits(self, inputs: StepInputs) -> Tensor:
        """Run a step without choosing: logits (M, V)."""
        return self._run(inputs)

    def choose(self, logits: Tensor, sampling: SamplingInputs) -> StepOutput:
        """Choose tokens from logits (M, V)."""
        with torch.inference_mode():
            tensors = SamplingTensors.from_inputs(sampling, CPU)
            choice = choose_tokens(logits, tensors, self.counts if tensors.penalties else None)
        self.last_tokens[sampling.numbers] = choice.tokens.numpy()
        return choice.output()

    def _run(self, inputs: StepInputs, tokens: NDArray[np.int32] | None = None) -> Tensor:
        """Return logits (M, V); write the most likely tokens (M,), -1 where the largest logit is not finite."""
        ids, count = inputs.ids, len(inputs.outputs)
        if (ids == LAST_TOKEN).any():
            ids = np.where(ids == LAST_TOKEN, self.last_tokens[inputs.numbers[inputs.rows]], ids)
        width = -(-self.vocab_size // LANES) * LANES
        if count * width > len(self.logits_buffer):
            self.logits_buffer = torch.empty(count * width)
        logits = self.logits_buffer[: count * width].view(count, width)
        fields = ("rows", "positions", "slots", "outputs", "table", "source_table", "source_lengths")
        arrays = {name: _as_int32(getattr(inputs, name)) for name in fields} | {"ids": _as_int32(ids)}
        step = StepStruct(
            **{name: array.ctypes.data for name, array in arrays.items() if array is not None},
            logits=logits.data_ptr(),
            tokens=None if tokens is None else tokens.ctypes.data,
            num_tokens=len(ids),
            num_rows=len(inputs.numbers),
            num_outputs=count,
            table_width=inputs.table.shape[1],
            span=inputs.span,
            source_width=0 if inputs.source_table is None else inputs.source_table.shape[1],
        )
        self.workspace.run(self.decoder, step)
        return logits[:, : self.vocab_size]

    def encode(self, inputs: EncodeInputs) -> None:
        """Run the encoder, and write the cross-attention keys and values of every decoder layer."""
        lengths = np.array([len(ids) for ids in inputs.ids], np.int32)
        first, tokens = 0, 0
        for row, length in enumerate(lengths.tolist()):
            if tokens and tokens + length > ENCODE_TOKENS:
                self._encode(inputs, slice(first, row), lengths)
                first, tokens = row, 0
            tokens += length
        self._encode(inputs, slice(first, len(lengths)), lengths)

    @torch.inference_mode()
    def _encode(self, inputs: EncodeInputs, rows: slice, lengths: NDArray[np.int32]) -> None:
        """Encode some of the sources, packed without padding."""
        config, network = self.network.config, self.network
        lengths = lengths[rows]
        starts, total, longest = np.cumsum(lengths) - lengths, int(lengths.sum()), int(lengths.max(initial=1))
        row_of = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        tokens = np.arange(total, dtype=np.int32)
        positions = tokens - starts[row_of].astype(np.int32)
        ids = np.fromiter(chain.from_iterable(inputs.ids[rows]), np.int32, total)
        table = np.minimum(starts[:, None] + np.arange(longest), max(total - 1, 0)).astype(np.int32)
        keys, values = torch.empty(2, total, config.kv_heads, config.head_dim)
        assert network.encoder is not None
        encoder = NetworkStruct.from_buffer_copy(network.encoder)
        layers = (LayerStruct * encoder.num_layers)(*layer_structs(encoder))
        for layer in layers:  # each is done with them before the next begins
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        encoder.layers, encoder.slots = ctypes.cast(layers, ctypes.c_void_p).value, total
        hidden = torch.empty(total, config.dim)
        arrays = {"ids": ids, "rows": row_of, "positions": positions, "slots": tokens, "outputs": tokens}
        arrays |= {"table": table, "lengths": lengths}
        step = StepStruct(
            **{name: array.ctypes.data for name, array in arrays.items()},
            hidden=hidden.data_ptr(),
            num_tokens=total,
            num_rows=len(lengths),
            num_outputs=total,
            table_width=longest,
            span=1,
        )
        self.workspace.run(encoder, step)
        pages = np.zeros((len(lengths), -(-longest // PAGE_SIZE)), np.int64)
        for n, table in enumerate(inputs.tables[rows]):
            pages[n, : len(table)] = table[: pages.shape[1]]
        slots = torch.from_numpy(pages[row_of, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE)
        for (linear, key_norm), *pools in zip(network.source_kv, self.cache.keys, self.cache.values, strict=True):
            k, v = linear(hidden).unflatten(1, (2, config.kv_heads, -1)).unbind(1)  # (N, G, E)
            k = k if key_norm is None else F.rms_norm(k, (config.head_dim,), key_norm, config.norm_eps)
            for pool, x in zip(pools, (k, v), strict=True):
                pool[slots] = x.to(pool.dtype)

    def copy_slots(self, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copy keys and values of all layers between slots."""
        sources, targets = torch.from_numpy(source), torch.from_numpy(target)
        for pool in (*self.cache.keys, *self.cache.values):
            pool[targets] = pool[sources]


def _as_int32(x: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
    return None if x is None else np.ascontiguousarray(x, np.int32)
