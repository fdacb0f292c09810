"""Speculative decoding: a cheap draft proposes several tokens, and one step of the network verifies them all.

B batch · N draft tokens · T tokens

The choice of a token is a plain function of logits, seed and position (see `sampling`), so verification is a
comparison: a draft token is accepted if the network chooses the same. The output equals that of plain decoding, greedy
or sampled, whatever the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead.config import GenerationConfig
from clearhead.errors import UserError
from clearhead.inference.generation_batch import GenerationBatch
from clearhead.inference.make_runner import StepNetwork
from clearhead.inference.request import TokenIds
from clearhead.inference.step_batch import StepBatch


class DraftState(Protocol):
    """A draft for the rows of one batch."""

    def propose(self, batch: GenerationBatch, count: int) -> Tensor:
        """Return draft tokens (B, count) for the next `count` tokens of each row."""

    def select(self, rows: Tensor) -> None:
        """Keep or reorder rows: row n becomes the old row rows[n]."""


class Draft(Protocol):
    """A source of draft tokens."""

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens proposed at a time."""

    def begin(
        self, prompts: Sequence[TokenIds], sources: Sequence[TokenIds] | None, config: GenerationConfig
    ) -> DraftState:
        """Prepare a batch of prompts, which the caller then repeats for each sample."""


class SpeculativeBatch(GenerationBatch):
    """A batch in which each row gets its accepted draft tokens and one more token a step."""

    def __init__(self, *args: Any, draft_state: DraftState, num_draft_tokens: int):
        super().__init__(*args)
        self.draft_state, self.num_draft_tokens = draft_state, num_draft_tokens

    def advance(self) -> Tensor:
        """Decode one or more tokens in every row; return tokens (B, N + 1), of which a row may have accepted fewer."""
        longest = max(self.prompt_lengths) + self.config.max_new_tokens
        room = min(longest, self.runner.config.max_positions) - max(self.lengths())
        left = max(self.limits[index] - count for index, count in zip(self.active, self.num_new, strict=True))
        room = min(room, left - 1)
        if self.pending is None or room < 1:
            return super().advance()
        draft = self.draft_state.propose(self, min(self.num_draft_tokens, room))  # (B, N)
        logits = self.runner.decode_step(torch.cat([self.pending[:, None], draft], dim=1))  # (B, N + 1, V)
        all_match = torch.ones_like(self.finished)  # (B,) whether all draft tokens so far were right
        columns, valid = [], []
        for position in range(logits.shape[1]):
            chosen = self.choose(logits[:, position])
            self.append(logits[:, position], chosen)
            columns.append(chosen)
            valid.append(all_match)
            if position < draft.shape[1]:
                all_match = all_match & (chosen == draft[:, position])
        tokens = torch.stack(columns, dim=1)
        self._accept_valid(tokens, torch.stack(valid, dim=1))
        return tokens

    def _accept_valid(self, tokens: Tensor, valid: Tensor) -> None:
        """Accept of tokens (B, N + 1) those before and at the first wrong draft token, and rewind the rest."""
        before = self.num_new
        accepted = [
            min(count, self.limits[index] - old)
            for count, index, old in zip(valid.sum(dim=1).tolist(), self.active, before, strict=True)
        ]
        self.num_new = [old + count for old, count in zip(before, accepted, strict=True)]
        lengths = self.lengths()
        self.runner.rewind([length - 1 for length in lengths])  # the last token is not in the KV cache yet
        self.buffer.rewind(torch.tensor(self.num_new).to(tokens.device), max(lengths))
        last = torch.tensor(accepted).to(tokens.device)[:, None] - 1
        self.pending = tokens.gather(1, last)[:, 0]
        self.finished = self.finished | (self.is_eos(tokens) & valid).any(dim=1)
        self.remove_finished(tokens, accepted)

    def select(self, rows: Tensor) -> None:
        """Keep or reorder rows: row n becomes the old row rows[n]."""
        super().select(rows)
        self.draft_state.select(rows)


@dataclass(frozen=True)
class DraftModel:
    """Draft by a smaller network with the same vocabulary, with the same sampling options and noise."""

    network: StepNetwork
    num_draft_tokens: int = 4

    def begin(
        self, prompts: Sequence[TokenIds], sources: Sequence[TokenIds] | None, config: GenerationConfig
    ) -> DraftModelState:
        """Prefill the prompts."""
        total = max(map(len, prompts)) + config.max_new_tokens
        if total > self.network.config.max_positions:
            raise UserError(
                f"the draft model has {self.network.config.max_positions} positions, but prompt and text may need "
                f"{total}; lower max_new_tokens, or use another draft"
            )
        rows = len(prompts) * config.samples
        runner = StepBatch.of(self.network, prompts, sources, rows * (config.max_new_tokens + self.num_draft_tokens))
        runner.prefill()
        return DraftModelState(runner, [len(prompt) for prompt in prompts])


class DraftModelState:
    """The draft model's KV cache of a batch."""

    def __init__(self, runner: StepBatch, cached: list[int]):
        self.runner, self.cached = runner, cached  # tokens of each row in the draft model's KV cache

    def propose(self, batch: GenerationBatch, count: int) -> Tensor:
        """Decode `count` tokens (B, count) with the draft model."""
        buffer, lengths = batch.buffer, batch.lengths()
        num_new, max_length = buffer.num_new, buffer.max_length
        missing = max(length - min(cached, length - 1) for length, cached in zip(lengths, self.cached, strict=True))
        self.runner.rewind([length - missing for length in lengths])  # the same number of tokens for every row
        ids, columns = buffer.last_tokens(missing), []
        for _ in range(count):
            chosen = batch.choose(self.runner.decode_step(ids)[:, -1])
            columns.append(chosen)
            buffer.append(chosen)
            ids = chosen[:, None]
        buffer.rewind(num_new, max_length)
        self.cached = [length + count - 1 for length in lengths]
        return torch.stack(columns, dim=1)

    def select(self, rows: Tensor) -> None:
        """Keep or reorder rows: row n becomes the old row rows[n]."""
        self.runner.select(rows)
        self.cached = [self.cached[row] for row in rows.tolist()]


@dataclass(frozen=True)
class PromptLookup:
    """Draft by n-gram lookup: the tokens that followed the last occurrence of the row's final n-gram."""

    num_draft_tokens: int = 8
    max_length: int = 3  # of the n-gram; shorter ones are tried where it does not occur

    def begin(
        self, prompts: Sequence[TokenIds], sources: Sequence[TokenIds] | None, config: GenerationConfig
    ) -> PromptLookup:
        """Return itself: a lookup has no state."""
        return self

    def propose(self, batch: GenerationBatch, count: int) -> Tensor:
        """Return the tokens (B, count) after the match; without one, the row's first tokens, at equal cost."""
        buffer = batch.buffer
        start = torch.zeros_like(buffer.lengths)  # (B,) position after the match
        for size in range(1, min(self.max_length, buffer.max_length - 1) + 1):  # longer n-grams override
            matches = (buffer.ids.unfold(1, size, 1) == buffer.last_tokens(size)[:, None]).all(dim=-1)  # (B, n-grams)
            positions = torch.arange(matches.shape[1], device=matches.device) + size
            positions = positions.masked_fill(~matches | (positions >= buffer.lengths[:, None]), 0).amax(dim=1)
            start = torch.where(positions > 0, positions, start)
        # At the end of the row, the repetition wraps around.
        offsets = torch.arange(count, device=start.device) % (buffer.lengths - start)[:, None]
        return buffer.ids.gather(1, start[:, None] + offsets)

    def select(self, rows: Tensor) -> None:
        """Do nothing: a lookup has no state."""
