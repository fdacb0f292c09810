"""Greedy search and sampling by CUDA graph replay: one launch decodes a token in every row.

B batch · N tokens · V vocabulary

`enable_cuda_graphs` turns this on for a network; searches that cannot use graphs run without them. A capture takes as
long as about ten steps; the first one on a machine takes a second or two more, to build the attention kernel. With
`compiled`, torch.compile first fuses and tunes all kernels, which takes up to some tens of seconds for each batch size
and each doubling of the context: for a server, or for many texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from clearhead.config import GenerationConfig
from clearhead.inference.cuda_graph import CapturedGraph, GraphSampling, step_functions
from clearhead.inference.generation_batch import GenerationBatch, sync_interval
from clearhead.inference.logits_processors import build_processors
from clearhead.inference.model_runner import ModelRunner
from clearhead.inference.optimize import has_hooks
from clearhead.inference.request import TokenIds
from clearhead.inference.sampling import Sampler
from clearhead.inference.static_decoder import CHUNK, FusedLinear, can_be_static, static_copy
from clearhead.inference.stop_strings import StopStrings
from clearhead.model import Decoder, Network

MIN_NEW_TOKENS = 16  # with fewer, a capture does not pay
MIN_SLOTS = 4 * CHUNK  # of the smallest graph; there is one for each doubling
MAX_IDLE_GRAPHS = 4


class GraphCache:
    """The captured graphs of one network; a graph belongs to one batch at a time."""

    def __init__(self, network: Decoder, compiled: bool):
        self.static_network, self.compiled = static_copy(network), compiled
        modules = self.static_network.modules()
        self.int8 = any(isinstance(module, FusedLinear) and module.scale is not None for module in modules)
        self.data_ptrs = _data_ptrs(network)
        self.captured: list[CapturedGraph] = []
        self.lock = Lock()

    def acquire(self, user: object, rows: int, tokens: int, choice: GraphSampling) -> CapturedGraph:
        """Return a graph for at least `rows` rows of `tokens` tokens, reserved until its user is garbage-collected."""
        key = _next_power_of_2(rows), max(MIN_SLOTS, _next_power_of_2(tokens)), choice
        with self.lock:
            idle = [graph for graph in self.captured if graph.user is None or graph.user() is None]
            matching = [graph for graph in idle if (graph.rows, graph.slots, graph.choice) == key]
            acquired = matching[0] if matching else self._capture(*key)
            acquired.user = ref(user)
            busy = [graph for graph in self.captured if graph not in idle]
            still_idle = [graph for graph in idle if graph is not acquired]
            self.captured = [*busy, *still_idle[-MAX_IDLE_GRAPHS:], acquired]
        return acquired

    def _capture(self, rows: int, slots: int, choice: GraphSampling) -> CapturedGraph:
        functions = step_functions(self.compiled, rows, self.int8)
        return CapturedGraph(self.static_network, functions, rows, slots, choice)

    def make_batch(
        self,
        runner: ModelRunner,
        logits: Tensor,
        prompts: Sequence[TokenIds],
        config: GenerationConfig,
        eos_ids: Sequence[int],
        seeds: Sequence[int],
        stop_strings: StopStrings | None = None,
    ) -> GenerationBatch:
        """Return a batch that continues after a prefill, with replays if there are enough tokens to decode."""
        if config.max_new_tokens < MIN_NEW_TOKENS:
            return GenerationBatch(runner, logits, prompts, config, eos_ids, seeds, stop_strings)
        if build_processors(config, torch.tensor(eos_ids)):  # these need all tokens, so sampling stays outside
            replay_runner = ReplayRunner(runner, self, GraphSampling(None))
            return GenerationBatch(replay_runner, logits, prompts, config, eos_ids, seeds, stop_strings)
        replay_runner = ReplayRunner(runner, self, GraphSampling(Sampler.from_config(config), config.logprobs))
        replay_runner.set_seeds(seeds)
        return ReplayBatch(replay_runner, logits, prompts, config, eos_ids, seeds, stop_strings)


_GRAPHS: WeakKeyDictionary[Network, GraphCache] = WeakKeyDictionary()


def enable_cuda_graphs(network: Network, compiled: bool = False) -> bool:
    """Use CUDA graphs for greedy search and sampling with this network; return False if they are not supported.

    They are supported for decoders with full attention on a CUDA device. Beam search and speculative decoding do not
    use them. Outputs are the same except for near ties that rounding decides.
    """
    if not can_be_static(network) or network.decoder.embedding.tokens.weight.device.type != "cuda":
        return False
    _GRAPHS[network] = GraphCache(network, compiled)
    return True


def cuda_graphs_of(network: Network) -> GraphCache | None:
    """Return the graphs of a network for which they are enabled; replays would bypass forward hooks."""
    graphs = _GRAPHS.get(network)
    if graphs is None or has_hooks(network):
        return None
    if graphs.data_ptrs != _data_ptrs(network):  # its weights have moved since
        del _GRAPHS[network]
        return cuda_graphs_of(network) if enable_cuda_graphs(network, graphs.compiled) else None
    return graphs


def _data_ptrs(network: Network) -> list[int]:
    return [tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers())]


def _next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


class ReplayRunner(ModelRunner):
    """A runner whose decode steps are graph replays; it takes over the KV cache of another, without beams or rewind."""

    def __init__(self, runner: ModelRunner, graphs: GraphCache, choice: GraphSampling):
        cache = runner.cache
        self.network, self.config, self.device, self.graphs = runner.network, runner.config, runner.device, graphs
        self.max_length, self.num_rows = cache.max_length, len(cache)
        # Slots for a start only, not for max_new_tokens: a step reads every slot, and most texts end early.
        tokens = min(cache.capacity, self.max_length + MIN_SLOTS // 2)
        self.graph = graphs.acquire(self, self.num_rows, tokens, choice)
        layers = [(x.keys, x.values) for x in cache.layers if x.keys is not None and x.values is not None]
        self.graph.load_cache(layers, cache.lengths, self.max_length)

    def set_seeds(self, seeds: Sequence[int]) -> None:
        """Set the seed of each row; the first new token is sampled outside of the graph."""
        self.graph.seeds[: self.num_rows] = torch.tensor(seeds).to(self.device)
        self.graph.prompt_lengths.copy_(self.graph.lengths)

    def decode_step(self, ids: Tensor) -> Tensor:
        """Run a decode step on ids (B, 1); return logits (B, 1, V), valid until the next call."""
        self.set_inputs(ids)
        self.replay()
        return self.graph.logits[: self.num_rows, None]

    def set_inputs(self, ids: Tensor) -> None:
        """Set the input tokens (B, 1) of the next replay."""
        self.graph.ids[: self.num_rows] = ids

    def replay(self) -> None:
        """Replay one step, moving to a larger graph if all slots are used."""
        if self.max_length == self.graph.slots:
            self._grow()
        self.graph.replay()
        self.max_length += 1

    def _grow(self) -> None:
        old = self.graph
        new = self.graph = self.graphs.acquire(self, old.rows, 2 * old.slots, old.choice)
        new.load_cache(list(zip(old.keys, old.values, strict=True)), old.lengths, self.max_length)
        pairs = ((new.ids, old.ids), (new.prompt_lengths, old.prompt_lengths), (new.seeds, old.seeds))
        for target, source in pairs:
            target.copy_(source)
        old.user = None

    def select(self, rows: Tensor) -> None:
        """Keep or reorder rows: row n becomes the old row rows[n]."""
        self.graph.select(rows)
        self.num_rows = len(rows)


class ReplayBatch(GenerationBatch):
    """A batch whose tokens are chosen inside the graph; the host reads several steps at a time."""

    runner: ReplayRunner

    def advance(self) -> Tensor:
        """Decode one or more tokens in every row; return the tokens (B, N)."""
        if self.pending is None:  # the first is chosen from the prefill's logits
            return super().advance()
        left = min(self.limits[index] - count for index, count in zip(self.active, self.num_new, strict=True))
        interval = sync_interval(self.runner.device)
        # Longer texts are checked less often: tokens decoded after EOS are then a small part of the text.
        steps = min(left, max(interval, min(2 * interval, self.num_new[0] // 4)))
        self.runner.set_inputs(self.pending[:, None])
        columns, logprobs = [], []
        for _ in range(steps):
            self.runner.replay()
            graph, rows = self.runner.graph, self.runner.num_rows
            columns.append(graph.ids[:rows].clone())
            logprobs.append(graph.logprobs[:rows].clone() if self.config.logprobs else None)
        for column, logprob in zip(columns, logprobs, strict=True):
            self.buffer.append(column[:, 0], logprob)
        tokens = torch.cat(columns, dim=1)
        self.pending, self.num_new = tokens[:, -1], [count + steps for count in self.num_new]
        self.finished = self.finished | self.is_eos(tokens).any(dim=1)
        self.remove_finished(tokens, [steps] * len(tokens))
        return tokens
