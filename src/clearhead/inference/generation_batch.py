"""Greedy search and sampling: every row goes on by itself, one word a step.   B rows · V words"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.config import GenerationConfig
from clearhead.inference.logits_processors import processors
from clearhead.inference.output import GenerationOutput, scored
from clearhead.inference.sampling import Sampler
from clearhead.inference.step import Ids, Step, limits
from clearhead.inference.stop_strings import StopStrings
from clearhead.inference.token_buffer import TokenBuffer

WORTH_DROPPING = 0.75  # finished rows leave the batch when no more than this share of it is left


def sync_interval(device: torch.device) -> int:
    """Steps between two looks at which rows have ended: where looking means waiting for a GPU, not every one."""
    return 1 if device.type == "cpu" else 8


class GenerationBatch:
    """A batch of rows being written; rows that have ended leave it, and their outputs stand in `outputs`."""

    def __init__(
        self,
        step: Step,
        scores: Tensor,
        prompts: Sequence[Ids],
        config: GenerationConfig,
        ends: Sequence[int],
        seeds: Sequence[int],
        stops: StopStrings | None = None,
    ):
        device = step.device
        self.step, self.scores, self.config, self.stops = step, scores, config, stops
        self.limits = limits(prompts, config.max_new_tokens, step.network.config.max_positions)
        self.prompts = [len(prompt) for prompt in prompts]
        self.written = TokenBuffer(prompts, self.limits, scores.shape[-1], device)
        self.ends, self.seeds = torch.tensor(ends, dtype=torch.long).to(device), torch.tensor(seeds).to(device)
        self.processors, self.sampler = processors(config, self.ends), Sampler.of(config)
        self.ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.pending: Tensor | None = None  # (B,) chosen, but not read yet
        self.numbers = list(range(len(prompts)))  # which rows are still here,
        self.counts = [0] * len(prompts)  # and how many new tokens each of them has
        self.outputs: dict[int, GenerationOutput] = {}
        self.every = 1 if stops else sync_interval(device)
        self.watchers = [stops.watcher() for _ in prompts] if stops else []

    def run(self) -> list[GenerationOutput]:
        """Write until every row has ended; the outputs in the order of the prompts."""
        while self.numbers:
            self.advance()
        return [self.outputs[number] for number in sorted(self.outputs)]

    def advance(self) -> Tensor:
        """Write one more token in every row; the tokens (B, 1)."""
        if self.pending is not None:
            self.scores = self.step.next(self.pending[:, None])[:, 0]
        chosen = self.choose(self.scores)
        self.take(chosen)
        return chosen[:, None]

    def choose(self, scores: Tensor) -> Tensor:
        """The next token (B,) of each row, from the model's scores (B, V)."""
        return self.sampler(self.processed_logits(scores), self.seeds, self.written.new)

    def processed_logits(self, scores: Tensor) -> Tensor:
        """The model's scores (B, V) after all penalties and bans; themselves changed where nobody asks for them."""
        scores = scores.clone() if self.processors and self.config.logprobs else scores
        for process in self.processors:
            scores = process(scores, self.written)
        return scores

    def take(self, chosen: Tensor) -> None:
        """Let each row go on with this token (B,)."""
        self.put(self.scores, chosen)
        self.ended = self.ended | self.is_end(chosen)
        self.pending, self.counts = chosen, [count + 1 for count in self.counts]
        if self._at_limit() or self.counts[0] % self.every == 0:
            self.look(chosen[:, None], [1] * len(self.counts))

    def put(self, scores: Tensor, chosen: Tensor) -> None:
        """Write a token (B,) down, with the model's own log-probability of it, before any rule, where asked for."""
        chances = scores.log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0] if self.config.logprobs else None
        self.written.append(chosen, chances)

    def is_end(self, tokens: Tensor) -> Tensor:
        """Which of the tokens end a text."""
        return (tokens[..., None] == self.ends).any(dim=-1)

    def _at_limit(self) -> bool:
        return any(self.limits[number] == count for number, count in zip(self.numbers, self.counts, strict=True))

    def look(self, tokens: Tensor, taken: list[int]) -> None:
        """Which rows have ended? They leave if there are enough of them, or must since one is at its limit.

        Of `tokens` (B, N), row n has just taken taken[n]; only stop strings need to know.
        """
        ended = self.ended.tolist()
        if self.stops:
            for place, (number, row) in enumerate(zip(self.numbers, tokens.tolist(), strict=True)):
                ended[place] |= any(self.watchers[number].add(token) for token in row[: taken[place]])
        at_limit = [self.limits[number] == count for number, count in zip(self.numbers, self.counts, strict=True)]
        done = [a or b for a, b in zip(ended, at_limit, strict=True)]
        left = done.count(False)
        if left and not any(at_limit) and left > WORTH_DROPPING * len(done):
            return
        for place in (place for place, gone in enumerate(done) if gone):
            self.outputs[self.numbers[place]] = self._output(place)
        kept = [place for place, gone in enumerate(done) if not gone]
        self.numbers, self.counts = [self.numbers[place] for place in kept], [self.counts[place] for place in kept]
        if 0 < left < len(done):
            self.select(torch.tensor(kept).to(self.step.device))

    def sizes(self) -> list[int]:
        """How many tokens each row has, prompt and new."""
        return [self.prompts[number] + count for number, count in zip(self.numbers, self.counts, strict=True)]

    def select(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""
        self.step.select(rows)
        self.written.select(rows)
        self.seeds, self.ended = self.seeds[rows], self.ended[rows]
        self.pending = None if self.pending is None else self.pending[rows]

    def _output(self, place: int) -> GenerationOutput:
        """A row that is done, cut off at its end: between two looks it may have written on."""
        (ids, chances), ends = self.written.of(place), set(self.ends.tolist())
        stop = self.watchers[self.numbers[place]].stopped if self.stops else None
        end = next((number for number, token in enumerate(ids) if token in ends), None)
        if stop is not None and (end is None or stop <= end):
            ids, tokens, finished = ids[:stop], stop, True
        elif end is not None:
            ids, tokens, finished = ids[:end], end + 1, True
        else:
            tokens, finished = len(ids), False
        return scored(ids, finished, chances[:tokens], self.config)
