"""One decode step over static tensors, captured once as a CUDA graph and replayed.

B batch · D model dim · C slots · V vocabulary

A step of a small batch is hundreds of kernels of a few microseconds each, less than the host needs to launch them; a
replay launches them all at once. On a CPU nothing is captured: a replay runs the step, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.inference.sampling import Sampler, gumbel_noise
from clearhead.inference.static_decoder import StaticKV
from clearhead.model import Decoder
from clearhead.model.positions import rope_cos_sin


class GraphSampling(NamedTuple):
    """What a captured step does with its logits: store them (sampler None) or choose tokens, maybe with logprobs."""

    sampler: Sampler | None
    logprobs: bool = False


# The functions of a step, compiled separately, so that a layer is compiled once for all layers.


def _embed(embedding: nn.Module, config: ModelConfig, ids: Tensor, lengths: Tensor, slots: int) -> Any:
    """Return embeddings (B, 1, D), RoPE factors and the attention bias (B, 1, 1, C)."""
    positions = lengths[:, None]
    x = embedding(ids, positions)
    masked = torch.arange(slots, device=ids.device) > positions
    attn_bias = torch.zeros(masked.shape, dtype=x.dtype, device=x.device).masked_fill(masked, -torch.inf)
    return x, rope_cos_sin(config, positions) if config.position == "rotary" else None, attn_bias[:, None, None]


def _layer(layer: nn.Module, x: Tensor, rope: Any, cache: StaticKV) -> Tensor:
    return layer(x, None, rope, None, None, cache)


def _logits(norm: nn.Module | None, lm_head: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """Return logits (B, V), and increment the lengths in place."""
    lengths += 1
    logits: Tensor = lm_head(x if norm is None else norm(x))[:, 0]
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _greedy(norm: nn.Module | None, lm_head: nn.Module, x: Tensor, lengths: Tensor, ids: Tensor) -> None:
    """Write the most likely next token into ids."""
    ids.copy_(_logits(norm, lm_head, x, lengths).argmax(dim=-1, keepdim=True))


class StepFunctions(NamedTuple):
    """The functions of a step."""

    embed: Callable[..., Any] = _embed
    layer: Callable[..., Tensor] = _layer
    logits: Callable[..., Tensor] = _logits
    greedy: Callable[..., None] = _greedy
    gumbel_noise: Callable[..., Tensor] = gumbel_noise


def step_functions(compiled: bool, rows: int, int8: bool = False) -> StepFunctions:
    """Return the functions of a step, compiled or not.

    Compiled, matmuls of one row become tuned reductions, those of more rows use cuBLAS. Autotuning such short matmuls
    would measure launch overhead, and cuBLAS's choice is as good; only for int8 weights does it generate kernels, which
    read the weights without a copy in floating point.
    """
    if not compiled:
        return StepFunctions()
    options: Any = {"coordinate_descent_tuning": True} if rows == 1 else {"max_autotune_gemm": int8}
    return StepFunctions(
        *(torch.compile(function, fullgraph=True, dynamic=False, options=options) for function in StepFunctions())
    )


class CapturedGraph:
    """A decode step of B rows: reads `ids`, and replaces them by the chosen tokens or writes `logits`."""

    user: ReferenceType[object] | None = None  # whose rows are in the static tensors

    def __init__(self, network: Decoder, functions: StepFunctions, rows: int, slots: int, choice: GraphSampling):
        self.network, self.functions, self.rows, self.slots, self.choice = network, functions, rows, slots, choice
        config, weight = network.config, network.decoder.embedding.tokens.weight
        with torch.inference_mode(False), torch.no_grad(), torch.device(weight.device):
            shape = (rows, config.kv_heads, slots, config.head_dim)
            self.keys = [torch.zeros(shape, dtype=weight.dtype) for _ in network.decoder.layers]
            self.values = [torch.zeros(shape, dtype=weight.dtype) for _ in network.decoder.layers]
            self.ids = torch.zeros(rows, 1, dtype=torch.long)
            self.lengths = torch.zeros(rows, dtype=torch.long)  # cached tokens of each row
            self.prompt_lengths = torch.zeros(rows, dtype=torch.long)
            self.seeds = torch.zeros(rows, dtype=torch.long)
            self.vocab = torch.arange(config.target_vocab)
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self.logits = torch.zeros(rows, config.target_vocab, dtype=dtype)
            self.logprobs = torch.zeros(rows, dtype=dtype)
        self.graph = self._capture() if weight.device.type == "cuda" else None

    def replay(self) -> None:
        """Run one step."""
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _step(self) -> None:
        run, decoder, lm_head = self.functions, self.network.decoder, self.network.heads.lm_head
        sampler, with_logprobs = self.choice
        x, rope, attn_bias = run.embed(decoder.embedding, self.network.config, self.ids, self.lengths, self.slots)
        for layer, keys, values in zip(decoder.layers, self.keys, self.values, strict=True):
            x = run.layer(layer, x, rope, StaticKV(keys, values, self.lengths, attn_bias))
        if sampler is not None and sampler.temperature == 0 and not with_logprobs:
            return run.greedy(decoder.norm, lm_head, x, self.lengths, self.ids)
        logits = run.logits(decoder.norm, lm_head, x, self.lengths)
        if sampler is None:
            self.logits.copy_(logits)
            return None
        perturbed = logits
        if sampler.temperature:
            noise = run.gumbel_noise(self.seeds, self.lengths - self.prompt_lengths, self.vocab)
            perturbed = sampler.filter_logits(logits) + noise
        self.ids.copy_(perturbed.argmax(dim=-1, keepdim=True))
        if with_logprobs:
            self.logprobs.copy_(logits.log_softmax(dim=-1).gather(1, self.ids)[:, 0])
        return None

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Warm up compilers and libraries with a few steps, then capture one."""
        limits: Any = nullcontext()
        if self.functions != StepFunctions():  # every size is compiled; past the limits torch would run some eagerly
            limits = torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10_000)
        with limits, torch.cuda.device(self.ids.device):
            for _ in range(3):  # on the current stream: for another one, cuBLAS would allocate 64 MiB for good
                self._step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
        return graph

    def load_cache(self, layers: Sequence[tuple[Tensor, Tensor]], lengths: Tensor, tokens: int) -> None:
        """Copy the first `tokens` keys and values (R, G, C', E) of each layer, and the length of each row (R,)."""
        for target, source in zip(zip(self.keys, self.values, strict=True), layers, strict=True):
            for static, cached in zip(target, source, strict=True):
                static.zero_()  # masked slots have weight 0, but 0 · nan would be nan
                static[: len(lengths), :, :tokens] = cached[:, :, :tokens]
        self._set_lengths(lengths)

    def select(self, rows: Tensor) -> None:
        """Keep or reorder rows: row n becomes the old row rows[n]."""
        for tensor in (*self.keys, *self.values, self.ids, self.prompt_lengths, self.seeds):
            tensor[: len(rows)] = tensor[rows]
        self._set_lengths(self.lengths[rows])

    def _set_lengths(self, lengths: Tensor) -> None:
        """Set the lengths; unused rows start at 0, so none is ever longer than the longest used row."""
        self.lengths.zero_()
        self.lengths[: len(lengths)] = lengths
