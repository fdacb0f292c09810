"""Speculative decoding: something cheap guesses several tokens, one step of the network checks them all.

B rows · N guesses · V words

A choice is a plain function of the scores, the row's seed and the place (see `sampling`), so checking is comparing: a
guess stands if the network itself would have chosen it. The text is the one that the plain search writes, greedy or
sampled, whatever the guesses are; good guesses only make it come sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead.errors import UserError
from clearhead.inference.generation_batch import GenerationBatch
from clearhead.inference.step import Ids, Step, Writer


class DraftState(Protocol):
    """What guesses for the rows of one batch."""

    def propose(self, rows: GenerationBatch, count: int) -> Tensor:
        """What the next `count` tokens of each row may be: (B, count)."""

    def select(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""


class Draft(Protocol):
    """A way to guess, and how many tokens ahead."""

    @property
    def num_draft_tokens(self) -> int:
        """Tokens."""

    def begin(self, prompts: Sequence[Ids], sources: Sequence[Ids] | None, room: int) -> DraftState:
        """Get ready for a batch of prompts that will each grow by at most `room` tokens."""


class Speculative(GenerationBatch):
    """Rows that go on by as many tokens a step as were guessed right, and one more."""

    def __init__(self, *args: Any, guesser: DraftState, num_draft_tokens: int):
        super().__init__(*args)
        self.guesser, self.num_draft_tokens = guesser, num_draft_tokens

    def advance(self) -> Tensor:
        """Write one token or more in every row; the tokens (B, N + 1), of which a row may have taken fewer."""
        room = self.step.cache.capacity - self.step.cache.max_length - 1
        room = min(room, max(self.limits[n] - count for n, count in zip(self.numbers, self.counts, strict=True)) - 1)
        if self.pending is None or room < 1:
            return super().advance()
        guesses = self.guesser.propose(self, min(self.num_draft_tokens, room))
        scores = self.step.next(torch.cat([self.pending[:, None], guesses], dim=1))  # (B, N + 1, V)
        right = torch.ones_like(self.ended)  # (B,) whether all guesses so far were right
        tokens, valid = [], []
        for place in range(scores.shape[1]):
            chosen = self.choose(scores[:, place])
            self.put(scores[:, place], chosen)
            tokens.append(chosen)
            valid.append(right)
            if place < guesses.shape[1]:
                right = right & (chosen == guesses[:, place])
        found = torch.stack(tokens, dim=1)
        self._settle(found, torch.stack(valid, dim=1))
        return found

    def _settle(self, tokens: Tensor, valid: Tensor) -> None:
        """Keep of tokens (B, N + 1) those up to the first wrong guess, in whose place the network's own stands."""
        before = self.counts
        taken = [
            min(count, self.limits[number] - written)
            for count, number, written in zip(valid.sum(dim=1).tolist(), self.numbers, before, strict=True)
        ]
        self.counts = [written + count for written, count in zip(before, taken, strict=True)]
        sizes = self.sizes()
        self.step.rewind([size - 1 for size in sizes])  # the last token is chosen, but not read yet
        self.written.rewind(torch.tensor(self.counts).to(tokens.device), max(sizes))
        last = torch.tensor(taken).to(tokens.device)[:, None] - 1
        self.pending = tokens.gather(1, last)[:, 0]
        self.ended = self.ended | (self.is_end(tokens) & valid).any(dim=1)
        self.look(tokens, taken)

    def select(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""
        super().select(rows)
        self.guesser.select(rows)


@dataclass(frozen=True)
class DraftModel:
    """A smaller network with the same vocabulary guesses, by the same rules and the same noise."""

    network: Writer
    num_draft_tokens: int = 4

    def begin(self, prompts: Sequence[Ids], sources: Sequence[Ids] | None, room: int) -> DraftRows:
        """Read the prompts."""
        step, max_length = Step(self.network, len(prompts), max(map(len, prompts)) + room), max(map(len, prompts))
        if max_length + room > self.network.config.max_positions:
            raise UserError(
                f"the draft model has {self.network.config.max_positions} positions, but prompt and text may need "
                f"{max_length + room}; lower max_new_tokens, or use another draft"
            )
        step.start(prompts, sources)
        return DraftRows(step, [len(prompt) for prompt in prompts])


class DraftRows:
    """The draft model's own reading of the rows."""

    def __init__(self, step: Step, read: list[int]):
        self.step, self.read = step, read  # how many tokens of each row it has read

    def propose(self, rows: GenerationBatch, count: int) -> Tensor:
        """The draft's own next `count` tokens, (B, count)."""
        written, sizes = rows.written, rows.sizes()
        new, max_length = written.new, written.max_length
        behind = max(size - min(read, size - 1) for size, read in zip(sizes, self.read, strict=True))
        self.step.rewind([size - behind for size in sizes])  # all alike, though some have read more
        reading, guesses = written.recent(behind), []
        for _ in range(count):
            chosen = rows.choose(self.step.next(reading)[:, -1])
            guesses.append(chosen)
            written.append(chosen)
            reading = chosen[:, None]
        written.rewind(new, max_length)
        self.read = [size + count - 1 for size in sizes]
        return torch.stack(guesses, dim=1)

    def select(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""
        self.step.select(rows)
        self.read = [self.read[row] for row in rows.tolist()]


@dataclass(frozen=True)
class PromptLookup:
    """What followed the last time that the row's latest tokens stood in it; no second network is needed."""

    num_draft_tokens: int = 8
    max_length: int = 3  # tokens that have to be the same; where so many are not, fewer

    def begin(self, prompts: Sequence[Ids], sources: Sequence[Ids] | None, room: int) -> PromptLookup:
        """Nothing to get ready: all that is needed stands in the rows."""
        return self

    def propose(self, rows: GenerationBatch, count: int) -> Tensor:
        """(B, count); where nothing is found, the row's own first tokens, which cost no more than other guesses."""
        written = rows.written
        follows = torch.zeros_like(written.lengths)  # (B,) where the guess begins
        for size in range(1, min(self.max_length, written.max_length - 1) + 1):  # longer ones override
            same = (written.ids.unfold(1, size, 1) == written.recent(size)[:, None]).all(dim=-1)  # (B, windows)
            places = torch.arange(same.shape[1], device=same.device) + size
            places = places.masked_fill(~same | (places >= written.lengths[:, None]), 0).amax(dim=1)
            follows = torch.where(places > 0, places, follows)
        # Where the row ends, a repetition goes round.
        places = torch.arange(count, device=follows.device) % (written.lengths - follows)[:, None]
        return written.ids.gather(1, follows[:, None] + places)

    def select(self, rows: Tensor) -> None:
        """Nothing to change."""
