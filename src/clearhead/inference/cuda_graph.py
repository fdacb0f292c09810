"""One step of a decoder over tensors in fixed places, recorded once as a CUDA graph and then replayed.

B rows · D width · C slots · V words

A step of a small batch is hundreds of kernels that each take microseconds, less than the host needs to ask for them.
Recorded, they follow each other without it. On a CPU nothing is recorded: a replay is a call, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.inference.sampling import Sampler, gumbel
from clearhead.inference.static_decoder import StaticKV
from clearhead.model import Decoder
from clearhead.model.positions import rope_cos_sin


class Choice(NamedTuple):
    """What a step does with its scores: leave them, or choose by them, with log-probabilities or without."""

    sampler: Sampler | None
    chances: bool = False


# The pieces of a step, each compiled by itself: a layer once for all layers.


def _begin(embedding: nn.Module, config: ModelConfig, ids: Tensor, lengths: Tensor, slots: int) -> Any:
    """What enters the first layer (B, 1, D), the rotation, and what is added to the scores of slots (B, 1, 1, C)."""
    positions = lengths[:, None]
    x = embedding(ids, positions)
    behind = torch.arange(slots, device=ids.device) > positions
    hidden = torch.zeros(behind.shape, dtype=x.dtype, device=x.device).masked_fill(behind, -torch.inf)
    return x, rope_cos_sin(config, positions) if config.position == "rotary" else None, hidden[:, None, None]


def _layer(layer: nn.Module, x: Tensor, rotation: Any, held: StaticKV) -> Tensor:
    return layer(x, None, rotation, None, None, held)


def _scores(norm: nn.Module | None, words: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """The scores (B, V) of the next word; every row is longer by one now."""
    lengths += 1
    scores: Tensor = words(x if norm is None else norm(x))[:, 0]
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


def _best(norm: nn.Module | None, words: nn.Module, x: Tensor, lengths: Tensor, ids: Tensor) -> None:
    """Put the best next word in the place of the one that was read."""
    ids.copy_(_scores(norm, words, x, lengths).argmax(dim=-1, keepdim=True))


class Pieces(NamedTuple):
    """Functions that a step is made of."""

    begin: Callable[..., Any] = _begin
    layer: Callable[..., Tensor] = _layer
    scores: Callable[..., Tensor] = _scores
    best: Callable[..., None] = _best
    gumbel: Callable[..., Tensor] = gumbel


def pieces(compiled: bool, rows: int, small: bool = False) -> Pieces:
    """As they are, or compiled: one row's products as tuned sums, those of more rows by cuBLAS.

    What a compiler would measure of products as short as these is mostly how long it takes to ask for them, and its
    choice is as good as any. Only of `small` weights, of one byte, it makes kernels that read them as they are.
    """
    if not compiled:
        return Pieces()
    options: Any = {"coordinate_descent_tuning": True} if rows == 1 else {"max_autotune_gemm": small}
    return Pieces(*(torch.compile(piece, fullgraph=True, dynamic=False, options=options) for piece in Pieces()))


class CapturedGraph:
    """A step of B rows, ready to be replayed: it reads `ids`, and leaves there what it has chosen, or its `scores`."""

    user: ReferenceType[object] | None = None  # whose texts stand here

    def __init__(self, twin: Decoder, parts: Pieces, rows: int, slots: int, choice: Choice):
        self.twin, self.parts, self.rows, self.slots, self.choice = twin, parts, rows, slots, choice
        config, weight = twin.config, twin.decoder.embedding.tokens.weight
        with torch.inference_mode(False), torch.no_grad(), torch.device(weight.device):
            shape = (rows, config.kv_heads, slots, config.head_dim)
            self.keys = [torch.zeros(shape, dtype=weight.dtype) for _ in twin.decoder.layers]
            self.values = [torch.zeros(shape, dtype=weight.dtype) for _ in twin.decoder.layers]
            self.ids = torch.zeros(rows, 1, dtype=torch.long)
            self.lengths = torch.zeros(rows, dtype=torch.long)  # tokens that each row holds
            self.prompts = torch.zeros(rows, dtype=torch.long)  # how many of them were not written here
            self.seeds = torch.zeros(rows, dtype=torch.long)
            self.words = torch.arange(config.target_vocab)
            exact = torch.promote_types(weight.dtype, torch.float32)
            self.scores = torch.zeros(rows, config.target_vocab, dtype=exact)
            self.chances = torch.zeros(rows, dtype=exact)
        self.graph = self._record() if weight.device.type == "cuda" else None

    def replay(self) -> None:
        """One step."""
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _step(self) -> None:
        decoder, words, (sampler, chances) = self.twin.decoder, self.twin.heads.lm_head, self.choice
        x, rotation, hidden = self.parts.begin(decoder.embedding, self.twin.config, self.ids, self.lengths, self.slots)
        for layer, keys, values in zip(decoder.layers, self.keys, self.values, strict=True):
            x = self.parts.layer(layer, x, rotation, StaticKV(keys, values, self.lengths, hidden))
        if sampler is not None and sampler.temperature == 0 and not chances:
            return self.parts.best(decoder.norm, words, x, self.lengths, self.ids)
        scores = self.parts.scores(decoder.norm, words, x, self.lengths)
        if sampler is None:
            self.scores.copy_(scores)
            return None
        drawn = scores
        if sampler.temperature:
            noise = self.parts.gumbel(self.seeds, self.lengths - self.prompts, self.words)
            drawn = sampler.narrowed(scores) + noise
        self.ids.copy_(drawn.argmax(dim=-1, keepdim=True))
        if chances:
            self.chances.copy_(scores.log_softmax(dim=-1).gather(1, self.ids)[:, 0])
        return None

    def _record(self) -> torch.cuda.CUDAGraph:
        """Run a few times, so that compilers and libraries are ready, then record."""
        limits: Any = nullcontext()
        if self.parts != Pieces():  # a shape for each size; past its limits torch would run some of them uncompiled
            limits = torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10_000)
        with limits, torch.cuda.device(self.ids.device):
            for _ in range(3):  # on the stream at hand: for one of their own, cuBLAS would hold 64 MiB for good
                self._step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
        return graph

    def fill(self, layers: Sequence[tuple[Tensor, Tensor]], lengths: Tensor, tokens: int) -> None:
        """Take over the first `tokens` keys and values (R, G, C', E) of each layer, and how many each row has (R,)."""
        for held, given in zip(zip(self.keys, self.values, strict=True), layers, strict=True):
            for ours, theirs in zip(held, given, strict=True):
                ours.zero_()  # nothing that stood here may weigh, and 0 · nan would
                ours[: len(lengths), :, :tokens] = theirs[:, :, :tokens]
        self._set_lengths(lengths)

    def select(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""
        for tensor in (*self.keys, *self.values, self.ids, self.prompts, self.seeds):
            tensor[: len(rows)] = tensor[rows]
        self._set_lengths(self.lengths[rows])

    def _set_lengths(self, lengths: Tensor) -> None:
        """Rows that are not in use begin anew, so that none is ever longer than the longest that is."""
        self.lengths.zero_()
        self.lengths[: len(lengths)] = lengths
