"""Beam search: the best few beginnings of each row go on together.   B rows · K beams · C candidates · V words

A row's beams are the branches of one tree: the source and the prompt are held once, and going on from another beam
changes a path, not the cache. The rules are those of transformers: of the candidates, the best K may finish, and the
best K that have not ended go on; a finished text counts its end in its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.config import GenerationConfig
from clearhead.inference.generation_batch import WORTH_DROPPING, sync_interval
from clearhead.inference.logits_processors import processors
from clearhead.inference.output import GenerationOutput, divisor
from clearhead.inference.sampling import best
from clearhead.inference.step import Ids, Step, limits
from clearhead.inference.token_buffer import TokenBuffer


class Beams:
    """A batch of rows under beam search; rows that are decided leave it, and their outputs stand in `outputs`."""

    def __init__(
        self, step: Step, scores: Tensor, prompts: Sequence[Ids], config: GenerationConfig, ends: Sequence[int]
    ):
        rows, beams, device = len(prompts), config.beam, step.device
        self.step, self.config = step, config
        self.limits = limits(prompts, config.max_new_tokens, step.network.config.max_positions)
        self.left = torch.tensor(self.limits).to(device)
        self.ends = torch.tensor(ends, dtype=torch.long).to(device)
        self.processors = processors(config, self.ends)
        self.written = TokenBuffer(prompts, self.limits, scores.shape[-1], device)  # (B·K) rows, for the processors
        self.written.select(torch.arange(rows, device=device).repeat_interleave(beams))
        self.kept = max(2, 1 + len(ends)) * beams  # C: enough that K which have not ended are among them
        self.scores = scores[:, None].expand(-1, beams, -1)  # (B, K, V)
        self.totals = scores.new_full((rows, beams), -math.inf)  # (B, K) sums of log-probabilities
        self.totals[:, 0] = 0  # all beams begin alike: one stands for all
        self.tokens = torch.zeros(rows, beams, 0, dtype=torch.long, device=device)  # (B, K, new)
        self.gains = scores.new_zeros(rows, beams, 0)  # (B, K, new) the log-probability of each, where asked for
        self.finished = Finished(rows, beams, scores)
        self.open = torch.ones(rows, dtype=torch.bool, device=device)  # (B,) whether something better may come
        self.numbers, self.outputs = list(range(rows)), dict[int, list[GenerationOutput]]()
        self.count, self.every = 0, sync_interval(device)
        step.branch(beams, max(self.limits))

    def run(self) -> list[list[GenerationOutput]]:
        """Search until every row is decided; the best texts of each, in the order of the prompts."""
        while True:
            parents = self._advance()
            if not self.numbers:
                return [self.outputs[number] for number in sorted(self.outputs)]
            self.step.graft(parents)
            self.scores = self.step.next(self.tokens[:, :, -1])

    def _advance(self) -> Tensor:
        """Score what could come next, finish what ends, go on with the rest; the beams (B, K) that they follow."""
        totals, gains, parents, tokens = self._candidates()
        self.count += 1
        at_end = (tokens[..., None] == self.ends).any(dim=-1)  # (B, C)
        ended = at_end | (self.left <= self.count)[:, None]
        self._finish(totals, gains, parents, tokens, at_end, ended)
        self.totals, going = totals.masked_fill(ended, -math.inf).topk(self.config.beam, dim=1)  # (B, K)
        parents, tokens, gains = (x.gather(1, going) for x in (parents, tokens, gains))
        self.tokens, self.gains = self._follow(parents, tokens, gains)
        if self.processors:
            rows = torch.arange(len(parents), device=parents.device)[:, None] * self.config.beam
            self.written.select((rows + parents).flatten())
            self.written.append(tokens.flatten())
        self._decide()
        at_limit = any(self.limits[number] == self.count for number in self.numbers)
        return self._look(parents, at_limit) if at_limit or self.count % self.every == 0 else parents

    def _candidates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The C best continuations of each row, best first: totals, own log-probabilities, beams and tokens (B, C)."""
        scores = self.scores.flatten(0, 1).contiguous()  # (B·K, V), which nobody else reads
        scores = torch.log_softmax(scores, -1, out=scores if scores.is_cpu else None)
        for process in self.processors:
            scores = process(scores, self.written)
        scores = scores.unflatten(0, self.totals.shape)  # (B, K, V)
        totals, beams, words = best(scores, self.totals, self.kept)
        gains = scores.flatten(1).gather(1, beams * scores.shape[2] + words)
        return totals, gains, beams, words

    def _follow(self, parents: Tensor, tokens: Tensor, gains: Tensor) -> tuple[Tensor, Tensor]:
        """What stands in the beams `parents` (B, N), and one token more: tokens and their gains (B, N, new)."""
        tokens = torch.cat([_take(self.tokens, parents), tokens[:, :, None]], dim=2)
        if self.config.logprobs:
            return tokens, torch.cat([_take(self.gains, parents), gains[:, :, None]], dim=2)
        return tokens, self.gains[:, :1].expand(-1, tokens.shape[1], -1)

    def _finish(
        self, totals: Tensor, gains: Tensor, parents: Tensor, tokens: Tensor, at_end: Tensor, ended: Tensor
    ) -> None:
        """Those of the best K candidates that have ended join the finished texts, if the row is still open."""
        first = slice(self.config.beam)
        may = ended[:, first] & self.open[:, None]
        if may.is_cpu and not may.any():  # nothing to merge; on a GPU, asking would cost more
            return
        scores = (totals[:, first] / divisor(self.config, self.count)).masked_fill(~may, -math.inf)
        texts = self._follow(parents[:, first], tokens[:, first], gains[:, first])
        self.finished.merge(scores, at_end[:, first], *texts)

    def _decide(self) -> None:
        """Whether a row could still do better, as `early_stopping` sees it."""
        worst = self.finished.scores[:, -1]  # -inf until there are K
        if self.config.early_stopping == "never" and self.config.length_penalty > 0:
            best = self.totals[:, 0] / divisor(self.config, self.left.to(self.totals.dtype))
        else:
            best = self.totals[:, 0] / divisor(self.config, self.count)
        better = worst.isneginf() if self.config.early_stopping == "full" else best > worst
        self.open = self.open & better & (self.left > self.count)

    def _look(self, parents: Tensor, at_limit: bool) -> Tensor:
        """Which rows are decided? They leave if there are enough of them, or must since one is at its limit."""
        going = self.open.tolist()
        left = going.count(True)
        if left and not at_limit and left > WORTH_DROPPING * len(going):
            return parents
        for place in (place for place, goes_on in enumerate(going) if not goes_on):
            self.outputs[self.numbers[place]] = self.finished.outputs(place, self.config)
        kept = [place for place, goes_on in enumerate(going) if goes_on]
        self.numbers = [self.numbers[place] for place in kept]
        if not 0 < left < len(going):
            return parents
        rows = torch.tensor(kept).to(self.step.device)
        self.step.select(rows)
        self.finished.select(rows)
        if self.processors:
            branches = torch.arange(self.config.beam, device=rows.device)
            self.written.select((rows[:, None] * self.config.beam + branches).flatten())
        self.left, self.open, self.totals = self.left[rows], self.open[rows], self.totals[rows]
        self.tokens, self.gains = self.tokens[rows], self.gains[rows]
        return parents[rows]


class Finished:
    """The best K finished texts of each row, best first; -inf where there is none yet."""

    def __init__(self, rows: int, beams: int, scores: Tensor):
        self.scores = scores.new_full((rows, beams), -math.inf)
        self.by_end = torch.zeros(rows, beams, dtype=torch.bool, device=scores.device)
        self.tokens = torch.zeros(rows, beams, 0, dtype=torch.long, device=scores.device)  # (B, K, new), -1 behind them
        self.gains = scores.new_zeros(rows, beams, 0)

    def merge(self, scores: Tensor, by_end: Tensor, tokens: Tensor, gains: Tensor) -> None:
        """Candidates (B, K), -inf for those that have not finished, with their tokens and gains (B, K, new)."""
        self.scores, best = torch.cat([self.scores, scores], dim=1).topk(self.scores.shape[1], dim=1)
        self.by_end = torch.cat([self.by_end, by_end], dim=1).gather(1, best)
        longer, more = (new.shape[2] - held.shape[2] for new, held in ((tokens, self.tokens), (gains, self.gains)))
        self.tokens = _take(torch.cat([F.pad(self.tokens, (0, longer), value=-1), tokens], dim=1), best)
        self.gains = _take(torch.cat([F.pad(self.gains, (0, more)), gains], dim=1), best)

    def select(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""
        self.scores, self.by_end = self.scores[rows], self.by_end[rows]
        self.tokens, self.gains = self.tokens[rows], self.gains[rows]

    def outputs(self, row: int, config: GenerationConfig) -> list[GenerationOutput]:
        """The n best of one row."""
        found = []
        for score, by_end, tokens, gains in zip(
            self.scores[row].tolist(),
            self.by_end[row].tolist(),
            self.tokens[row].tolist(),
            self.gains[row].tolist(),
            strict=True,
        ):
            length = tokens.index(-1) if -1 in tokens else len(tokens)
            ids = tokens[: length - 1 if by_end else length]
            if score > -math.inf:
                found.append(GenerationOutput(ids, by_end, score, gains[:length] if config.logprobs else None))
        return found[: config.n_best] or [GenerationOutput([], False, -math.inf)]


def _take(x: Tensor, beams: Tensor) -> Tensor:
    """What stands in the beams (B, N) of x (B, K, new): (B, N, new)."""
    return x.gather(1, beams[:, :, None].expand(-1, -1, x.shape[2]))
