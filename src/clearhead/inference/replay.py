"""Greedy search and sampling by CUDA graphs: one launch reads a token in every row and chooses the next.

R rows · N tokens · V words

`enable_cuda_graphs` says for which network; a search that graphs are no good for goes on without them. Recording takes about
as long as ten steps, the first time on a machine a second or two more, for the kernel of attention. With `compiled` all
kernels are fused and tuned by torch.compile first, which takes up to some tens of seconds for each batch size and each
doubling of the context: for a server, or for many texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from clearhead.config import GenerationConfig
from clearhead.inference.cuda_graph import CapturedGraph, Choice, pieces
from clearhead.inference.generation_batch import GenerationBatch, sync_interval
from clearhead.inference.logits_processors import processors
from clearhead.inference.sampling import Sampler
from clearhead.inference.static_decoder import CHUNK, FusedLinear, can_be_static, joined
from clearhead.inference.step import Ids, Step
from clearhead.inference.stop_strings import StopStrings
from clearhead.model import Decoder, Network

WORTH_RECORDING = 16  # new tokens from which on graphs are used
FIRST_SLOTS = 4 * CHUNK  # what a recording has at least; there is one for each doubling
KEPT = 4  # recordings that wait for their next use


class GraphCache:
    """What is recorded of one network; a recording belongs to one batch at a time."""

    def __init__(self, network: Decoder, compiled: bool):
        self.twin, self.compiled = joined(network), compiled
        self.small = any(isinstance(module, FusedLinear) and module.scale is not None for module in self.twin.modules())
        self.places = _places(network)
        self.recordings: list[CapturedGraph] = []
        self.lock = Lock()

    def take(self, user: object, rows: int, tokens: int, choice: Choice) -> CapturedGraph:
        """A recording for at least so many rows, of so many tokens each, until its user is gone."""
        kind = _power(rows), max(FIRST_SLOTS, _power(tokens)), choice
        with self.lock:
            idle = [one for one in self.recordings if one.user is None or one.user() is None]
            same = [one for one in idle if (one.rows, one.slots, one.choice) == kind]
            found = same[0] if same else self._record(*kind)
            found.user = ref(user)
            busy = [one for one in self.recordings if one not in idle]
            self.recordings = [*busy, *[one for one in idle if one is not found][-KEPT:], found]
        return found

    def _record(self, rows: int, slots: int, choice: Choice) -> CapturedGraph:
        return CapturedGraph(self.twin, pieces(self.compiled, rows, self.small), rows, slots, choice)

    def rows(
        self,
        step: Step,
        scores: Tensor,
        prompts: Sequence[Ids],
        config: GenerationConfig,
        ends: Sequence[int],
        seeds: Sequence[int],
        stops: StopStrings | None = None,
    ) -> GenerationBatch:
        """Rows that go on from where a step stands, by replays where there is enough to write."""
        if config.max_new_tokens < WORTH_RECORDING:
            return GenerationBatch(step, scores, prompts, config, ends, seeds, stops)
        if processors(config, torch.tensor(ends)):  # these look at all that is written, so the choice stays outside
            return GenerationBatch(ReplayStep(step, self, Choice(None)), scores, prompts, config, ends, seeds, stops)
        replayed = ReplayStep(step, self, Choice(Sampler.of(config), config.logprobs))
        replayed.draw_by(seeds)
        return ReplayBatch(replayed, scores, prompts, config, ends, seeds, stops)


_GRAPHS: WeakKeyDictionary[Network, GraphCache] = WeakKeyDictionary()


def enable_cuda_graphs(network: Network, compiled: bool = False) -> bool:
    """From now on let greedy search and sampling replay graphs of this network; False where it has none.

    It has if it is a decoder on a CUDA device that looks at everything, no sparse patterns. Beam search and drafts go
    on as before. Texts are those without graphs, but for near ties that rounding decides.
    """
    if not can_be_static(network) or network.decoder.embedding.tokens.weight.device.type != "cuda":
        return False
    _GRAPHS[network] = GraphCache(network, compiled)
    return True


def cuda_graphs_of(network: Network) -> GraphCache | None:
    """The graphs of a network that uses them."""
    graphs = _GRAPHS.get(network)
    if graphs is not None and graphs.places != _places(network):  # its weights have moved since
        del _GRAPHS[network]
        return cuda_graphs_of(network) if enable_cuda_graphs(network, graphs.compiled) else None
    return graphs


def _places(network: Network) -> list[int]:
    return [tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers())]


def _power(number: int) -> int:
    """The power of two that is at least that number."""
    return 1 << (number - 1).bit_length()


class ReplayStep(Step):
    """A step that goes on by replays from where another stands; it never branches and never rewinds."""

    def __init__(self, step: Step, graphs: GraphCache, choice: Choice):
        cache = step.cache
        self.network, self.device, self.graphs = step.network, step.device, graphs
        self.max_length, self.used = cache.max_length, len(cache)
        # Room for a beginning, not for all that may come: a step looks at every slot, and texts end early.
        room = min(cache.capacity, self.max_length + FIRST_SLOTS // 2)
        self.recording = graphs.take(self, self.used, room, choice)
        layers = [(x.keys, x.values) for x in cache.layers if x.keys is not None and x.values is not None]
        self.recording.fill(layers, cache.lengths, self.max_length)

    def draw_by(self, seeds: Sequence[int]) -> None:
        """The seed of each row, whose first new token was chosen outside."""
        self.recording.seeds[: self.used] = torch.tensor(seeds).to(self.device)
        self.recording.prompts.copy_(self.recording.lengths)

    def next(self, ids: Tensor) -> Tensor:
        """Read on: ids (R, 1) to the scores (R, 1, V) of what follows, which stand until the next call."""
        self.put(ids)
        self.replay()
        return self.recording.scores[: self.used, None]

    def put(self, ids: Tensor) -> None:
        """The tokens (R, 1) to be read next."""
        self.recording.ids[: self.used] = ids

    def replay(self) -> None:
        """Read one token in every row."""
        if self.max_length == self.recording.slots:
            self._grow()
        self.recording.replay()
        self.max_length += 1

    def _grow(self) -> None:
        old = self.recording
        new = self.recording = self.graphs.take(self, old.rows, 2 * old.slots, old.choice)
        new.fill(list(zip(old.keys, old.values, strict=True)), old.lengths, self.max_length)
        for ours, theirs in ((new.ids, old.ids), (new.prompts, old.prompts), (new.seeds, old.seeds)):
            ours.copy_(theirs)
        old.user = None

    def select(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""
        self.recording.select(rows)
        self.used = len(rows)


class ReplayBatch(GenerationBatch):
    """Rows whose words are chosen within the replay; the host takes up several at a time."""

    step: ReplayStep

    def advance(self) -> Tensor:
        """Write one token or more in every row; the tokens (R, N)."""
        if self.pending is None:  # the first is chosen by the scores behind the prompt
            return super().advance()
        left = min(self.limits[number] - count for number, count in zip(self.numbers, self.counts, strict=True))
        every = sync_interval(self.step.device)
        count = min(left, max(every, min(2 * every, self.counts[0] // 4)))  # a late look costs a share of the text
        self.step.put(self.pending[:, None])
        tokens, chances = [], []
        for _ in range(count):
            self.step.replay()
            recording, used = self.step.recording, self.step.used
            tokens.append(recording.ids[:used].clone())
            chances.append(recording.chances[:used].clone() if self.config.logprobs else None)
        for token, chance in zip(tokens, chances, strict=True):
            self.written.append(token[:, 0], chance)
        found = torch.cat(tokens, dim=1)
        self.pending, self.counts = found[:, -1], [before + count for before in self.counts]
        self.ended = self.ended | self.is_end(found).any(dim=1)
        self.look(found, [count] * len(found))
        return found
