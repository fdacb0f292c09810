"""Steps on a GPU: inputs in one transfer, CUDA graphs for small steps, tokens read while the next step runs.

N tokens · R rows · M outputs

Sizes are padded to a ladder, and a size is captured once it has run a few times: a replay launches its hundreds of
kernels at once. Padding belongs to a row of its own and is written to the scratch page.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.inference.cuda_decoder import CudaDecoder, DeviceStep, unsupported
from clearhead.inference.cuda_upload import Uploader
from clearhead.inference.reference_step import ReferenceRunner
from clearhead.inference.sampling import (
    COLUMNS,
    Choice,
    SamplingTensors,
    TokenCounts,
    choose_tokens,
    sampling_features,
)
from clearhead.inference.step import PAGE_SIZE, PagedKVCache, SamplingInputs, StepHandle, StepInputs, StepOutput
from clearhead.model import Decoder, EncoderDecoder
from clearhead.ops.triton.linear import begin_step
from clearhead.ops.triton.paged_attention import BlockTables, QueryTiles, tokens_per_tile

log = logging.getLogger("clearhead")
MAX_CAPTURED_TOKENS = 512  # larger steps keep the GPU busy while the host launches them
RUNS_BEFORE_CAPTURE = 2
MAX_GRAPHS = 128
FILL = {"top_p": 1, "repetition_penalty": 1}  # of padded outputs; other columns are 0
Columns = dict[str, NDArray[Any]]


class StepKind(NamedTuple):
    """What the host decides: a step of one kind is one CUDA graph."""

    tokens: int  # N, padded
    outputs: int  # M, padded
    decode: bool  # one token per row
    span: int
    source: bool
    sampling: tuple[int, bool, int, bool] | None  # the host's fields of SamplingTensors; None: logits are wanted


class CudaRunner(ReferenceRunner):
    """A StepRunner for a GPU; sources are encoded by the network itself."""

    asynchronous = True

    def __init__(self, network: Decoder | EncoderDecoder, cache: PagedKVCache, max_rows: int, bits: int = 16):
        super().__init__(network, cache, max_rows)
        self.decoder = CudaDecoder(network, cache, MAX_CAPTURED_TOKENS + max_rows, bits)
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.long, device=cache.device)  # the last row: padding
        pages = -(-cache.config.max_positions // PAGE_SIZE)
        self.uploader = Uploader(cache.device, 32 * (MAX_CAPTURED_TOKENS + max_rows) + max_rows * min(pages, 4096))
        self.graphs: dict[StepKind, tuple[torch.cuda.CUDAGraph, Tensor | Choice | None]] = {}
        self.runs: Counter[StepKind] = Counter()
        self.memory: Any = None  # shared by all graphs, since one runs at a time
        self.tile = tokens_per_tile(cache.config.heads // cache.config.kv_heads, cache.dtype)

    def start_row(self, number: int, prompt: list[int], new: list[int]) -> None:
        """Count the tokens of a row with penalties."""
        if self.counts is None:
            self.counts = TokenCounts(self.max_rows + 1, self.cache.config.target_vocab, self.cache.device)
        self.counts.start(number, prompt, new)

    @torch.inference_mode()
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> StepHandle:
        """Launch a step, and the copy of its tokens to the host."""
        return CudaHandle(self._run(inputs, sampling), len(inputs.outputs))

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> Tensor:
        """Run a step without choosing: logits (M, V) in fp32."""
        logits = self._run(inputs, None)
        assert isinstance(logits, Tensor)
        return logits[: len(inputs.outputs)].clone()

    def warmup(self, rows: int | None = None) -> None:
        """Capture greedy decode steps of up to `rows` rows."""
        sizes = sorted({_padded(size) for size in range(1, (rows or self.max_rows) + 1)})
        empty, wide = np.zeros(0, np.int32), np.zeros((0, 1), np.int32)
        is_translator = isinstance(self.network, EncoderDecoder)
        sources = (wide, empty) if is_translator else (None, None)
        inputs = StepInputs(empty, empty, empty, empty, empty, empty, wide, PAGE_SIZE, *sources)
        sampling = SamplingInputs(**{name: np.zeros(0, DTYPES[name]) for name in COLUMNS})  # type: ignore[arg-type]
        for size in reversed(sizes):  # the largest first: the others then fit into its memory
            kind = StepKind(size, size, True, PAGE_SIZE, is_translator, _sampling_kind(sampling))
            with torch.inference_mode():
                for _ in range(RUNS_BEFORE_CAPTURE + 1):
                    self._run_kind(kind, inputs, sampling)

    def _run(self, inputs: StepInputs, sampling: SamplingInputs | None) -> Tensor | Choice | None:
        """Run a step: the choice of tokens, or logits if there is no sampling."""
        tokens, outputs = len(inputs.ids), len(inputs.outputs)
        in_order = np.array_equal(inputs.rows, np.arange(tokens)) and np.array_equal(inputs.outputs, inputs.rows)
        decode = inputs.is_decode and in_order
        padded = _padded(tokens) if tokens <= MAX_CAPTURED_TOKENS else tokens
        wanted = padded if decode else _padded(outputs)
        kind = None if sampling is None else _sampling_kind(sampling)
        kinds = StepKind(padded, wanted, decode, inputs.span, inputs.source_table is not None, kind)
        return self._run_kind(kinds, inputs, sampling)

    def _run_kind(self, kind: StepKind, inputs: StepInputs, sampling: SamplingInputs | None) -> Tensor | Choice | None:
        columns = self._columns(kind, inputs, sampling)
        moved = self.uploader.upload(columns)
        if moved:
            self.graphs.clear()
        if kind not in self.graphs:
            self.runs[kind] += 1
            step = self._device_step(kind, self.uploader.views(columns))
            if self.runs[kind] <= RUNS_BEFORE_CAPTURE or not self._can_capture(kind):
                return self._compute(kind, *step)
            self._capture(kind, *step)
        graph, out = self.graphs[kind]
        graph.replay()
        return out

    def _columns(self, kind: StepKind, inputs: StepInputs, sampling: SamplingInputs | None) -> Columns:
        """Return the arrays of a step, padded; their sizes depend on its kind only, but for the tables."""
        n, m = kind.tokens, kind.outputs
        columns: Columns = {}
        if sampling is not None:
            arrays = {name: np.asarray(getattr(sampling, name)) for name in COLUMNS}
            for name in sorted(arrays, key=lambda name: -arrays[name].itemsize):  # 8 bytes first, for alignment
                fill = self.max_rows if name == "numbers" else FILL.get(name, 0)
                columns[f"sampling_{name}"] = _pad(arrays[name].astype(DTYPES[name], copy=False), m, fill)
        for name in ("ids", "rows", "positions", "slots"):
            columns[name] = _pad(getattr(inputs, name), n)
        columns["numbers"] = _pad(inputs.numbers, n, self.max_rows)
        columns["rows"][len(inputs.ids) :] = len(inputs.numbers)  # the first one of padding
        if not kind.decode:
            columns["outputs"] = _pad(inputs.outputs, m)
            tiles = _tiles(inputs.rows, self.tile)
            count = n if n <= MAX_CAPTURED_TOKENS else len(tiles[0])
            columns |= {name: _pad(tile, count) for name, tile in zip(QueryTiles._fields, tiles, strict=True)}
        tables = [inputs.table]
        if inputs.source_table is not None and inputs.source_lengths is not None:
            columns["source_lengths"] = _pad(inputs.source_lengths, n)
            tables.append(inputs.source_table)
        begins = np.cumsum([0, *(table.size for table in tables)])
        layout = [number for begin, table in zip(begins, tables, strict=False) for number in (begin, table.shape[1])]
        columns["layout"] = np.array(layout, np.int32)
        columns["tables"] = np.concatenate([table.ravel() for table in tables])
        return columns

    def _device_step(self, kind: StepKind, views: dict[str, Tensor]) -> tuple[DeviceStep, dict[str, Tensor]]:
        entries, layout = self.uploader.rest(views["tables"]), views["layout"]
        step = DeviceStep(
            views["ids"],
            None,
            views["positions"],
            views["slots"],
            BlockTables(entries, layout[:2], kind.span),
            None if kind.decode else QueryTiles(*(views[name] for name in QueryTiles._fields)),
            views.get("outputs"),
            BlockTables(entries, layout[2:], PAGE_SIZE) if kind.source else None,
            views.get("source_lengths"),
        )
        return step, views

    def _compute(self, kind: StepKind, step: DeviceStep, views: dict[str, Tensor]) -> Tensor | Choice | None:
        """Launch the kernels of a step."""
        numbers, frequencies = views["numbers"], self.decoder.frequencies
        ids, rope = begin_step(step.ids, views["rows"], numbers, self.last_tokens, step.positions, frequencies)
        logits = self.decoder(step._replace(ids=ids, rope=rope), head=kind.outputs > 0)
        if kind.sampling is None or not kind.outputs:
            return logits
        sampling = SamplingTensors(*(views[f"sampling_{name}"] for name in COLUMNS), *kind.sampling)  # type: ignore[call-arg, arg-type]
        assert logits is not None
        choice = choose_tokens(logits, sampling, self.counts if sampling.penalties else None)
        self.last_tokens[sampling.numbers] = choice.tokens
        return choice

    def _can_capture(self, kind: StepKind) -> bool:
        return kind.tokens <= MAX_CAPTURED_TOKENS and self.cache.device.type == "cuda"

    def _capture(self, kind: StepKind, step: DeviceStep, views: dict[str, Tensor]) -> None:
        """Capture a step, whose kernels have run before."""
        if len(self.graphs) >= MAX_GRAPHS:  # of options that come and go
            self.graphs.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
            out = self._compute(kind, step, views)
        self.memory = graph.pool()
        self.graphs[kind] = graph, out


class CudaHandle:
    """A launched step, whose tokens are on their way to the host."""

    def __init__(self, choice: Any, outputs: int):
        self.outputs, self.fields = outputs, Choice(*choice) if outputs else None
        if self.fields is not None:
            self.fields = Choice(*(None if x is None else _to_host(x[:outputs]) for x in self.fields))  # type: ignore[arg-type]
            self.done = None
            if choice.tokens.is_cuda:
                self.done = torch.cuda.Event()
                self.done.record()

    def result(self) -> StepOutput:
        """Wait for the tokens."""
        if self.fields is None:
            return StepOutput([], [])
        if self.done is not None:
            self.done.synchronize()
        return self.fields.output()


def _to_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True)


def cuda_runner(network: Any, cache: PagedKVCache, max_rows: int, bits: int = 16) -> tuple[CudaRunner | None, str]:
    """Return a runner for a network on a GPU, or None and the reason; `bits` of weights may be 16, 8 or 4."""
    if cache.device.type != "cuda":
        return None, f"the device is {cache.device.type}, not cuda"
    if reason := unsupported(network, cache.dtype):
        return None, reason
    try:
        runner = CudaRunner(network, cache, max_rows, bits)
        runner.warmup(1)
    except RuntimeError as error:  # Triton needs a C compiler, and raises what a compiler or a driver raises
        reason = str(error).split("\n")[0]
        log.warning("decoding without Triton's kernels, and slower: %s", reason)
        return None, reason
    return runner, ""


DTYPES = {
    "numbers": np.int32, "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32,
    "repetition_penalty": np.float32, "presence_penalty": np.float32, "frequency_penalty": np.float32,
    "seeds": np.int64, "num_new": np.int64,
}  # fmt: skip


def _sampling_kind(sampling: SamplingInputs) -> tuple[int, bool, int, bool]:
    """Return the options that a graph is captured for; the number of candidates is rounded up."""
    greedy, candidates, penalties = sampling_features(sampling)
    return sampling.logprobs, greedy, max(64, _power_of_2(candidates)) if candidates > 0 else candidates, penalties


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _padded(size: int) -> int:
    """Return the next size of the ladder."""
    if size <= 4:
        return _power_of_2(size) if size else 0
    step = 8 if size <= 64 else 32
    return -(-size // step) * step


def _pad(array: NDArray[Any], size: int, fill: float = 0) -> NDArray[Any]:
    out = np.full(size, fill, array.dtype)
    out[: len(array)] = array
    return out


def _tiles(rows: NDArray[np.int32], size: int) -> list[NDArray[np.int32]]:
    """Return the rows, begins and ends of tiles of at most `size` tokens of a row."""
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    counts = np.diff(begins, append=len(rows))
    tiles = -(-counts // size)  # of each row
    number = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)  # in its row
    first = np.repeat(begins, tiles) + number * size
    ends = np.minimum(first + size, np.repeat(begins + counts, tiles))
    return [np.repeat(rows[begins], tiles).astype(np.int32), first.astype(np.int32), ends.astype(np.int32)]
