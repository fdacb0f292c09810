"""One step of a network at work: new ids in, the score of every next word out, over the key-value cache.

B rows · P prompt tokens · T new tokens · V words · K branches

Every search stands on this: `start` reads prompts (and sources), `next` reads on, and between the two a search may
drop, repeat or rewind rows, or let each row grow several branches. What makes a step faster can be put around `next`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.inference.batches import raise_if_cancelled
from clearhead.inference.bf16_cache import BF16KVCache, can_use_bf16_cache
from clearhead.model import Decoder, EncoderDecoder, KVCache, TreeCache

Writer = Decoder | EncoderDecoder
Ids = Sequence[int]
PIECE = 512  # tokens of a prompt that are read at once where all prompts are equally long


class Step:
    """A network and what it has read so far, B rows of it."""

    def __init__(self, network: Writer, rows: int, capacity: int):
        if network.training:
            raise ValueError("the network is in training mode, where dropout is on; call network.eval() first")
        self.network = network
        self.cache = KVCache(network.config, rows, min(capacity, network.config.max_positions))
        self.device = network.decoder.embedding.tokens.weight.device

    def start(self, prompts: Sequence[Ids], sources: Sequence[Ids] | None = None) -> Tensor:
        """Read one prompt a row, a translator its source before that; the scores (B, V) of each row's next word."""
        ids, lengths = pad(prompts, self.device)
        if isinstance(self.network, EncoderDecoder):
            assert sources is not None
            encoder_output = self.network.encode(*pad(sources, self.device))
            hidden = self.network.decode(ids, encoder_output, lengths, cache=self.cache)  # (B, P, D)
        else:
            hidden = self._read(ids, lengths)
        last = hidden[:, -1] if lengths is None else hidden[torch.arange(len(hidden), device=self.device), lengths - 1]
        return self._words(last)

    def _read(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """Read prompts (B, P), long ones in pieces, which bounds memory; the hidden states (B, T, D) of the last."""
        assert isinstance(self.network, Decoder)
        if lengths is not None:
            return self.network.decode(ids, lengths, cache=self.cache)
        *pieces, last = ids.split(PIECE, dim=1)
        for piece in pieces:
            self.network.decode(piece, cache=self.cache)
        return self.network.decode(last, cache=self.cache)

    def next(self, ids: Tensor) -> Tensor:
        """Read on: ids (B, T), or (B, K) once there are branches, to the scores (B, T, V) of what follows each."""
        raise_if_cancelled()
        if isinstance(self.network, EncoderDecoder):
            return self._words(self.network.decode(ids, None, cache=self.cache))
        return self._words(self.network.decode(ids, cache=self.cache))

    def _words(self, hidden: Tensor) -> Tensor:
        scores = self.network.logits(hidden)
        return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores

    def select(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""
        self.cache.select(rows, tighten=self.device.type == "cpu")

    def join(self, other: Step, capacity: int) -> None:
        """The rows of another step of this network come behind our own; a row may then have `capacity` tokens."""
        self.cache.concat(other.cache, capacity)

    def drop(self, row: int) -> None:
        """One row leaves; the last takes its place."""
        self.cache.drop_row(row)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget what each row holds beyond so many tokens, prompt included."""
        self.cache.rewind(lengths)

    def branch(self, branches: int, steps: int) -> None:
        """From here on each row has so many branches, for at most so many steps."""
        self.cache = TreeCache(self.cache, branches, steps)
        if can_use_bf16_cache(self.network, len(self.cache)):
            self.cache.layers = [BF16KVCache.of(layer) for layer in self.cache.layers]

    def graft(self, parents: Tensor) -> None:
        """Branch k of row b goes on from branch parents[b, k]."""
        assert isinstance(self.cache, TreeCache)
        self.cache.reorder_beams(parents)


def pad(rows: Sequence[Ids], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows of ids as one tensor (B, longest), and their lengths (B,), or None where all are equally long."""
    sizes = [len(row) for row in rows]
    max_length = max(sizes)
    ids = torch.tensor([[*row, *[0] * (max_length - len(row))] for row in rows]).to(device, non_blocking=True)
    return ids, None if min(sizes) == max_length else torch.tensor(sizes).to(device, non_blocking=True)


def limits(prompts: Sequence[Ids], wanted: int, positions: int) -> list[int]:
    """How many tokens may come behind each prompt: as many as wanted, or until the model's positions end.

    The last token needs no position, since nothing is read after it.
    """
    return [min(wanted, positions - len(prompt) + 1) for prompt in prompts]
