"""Beam search.   B batch · K beams · C candidates · V vocabulary

The beams of a row are branches of a tree in the KV cache: the source and the prompt are stored once, and reordering the
beams changes the tree mask, not the cache. The rules are those of transformers: the best K candidates may finish, the
best K unfinished candidates continue, and the length of a finished hypothesis includes EOS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.config import GenerationConfig
from clearhead.inference.generation_batch import COMPACT_THRESHOLD, sync_interval
from clearhead.inference.logits_processors import build_processors
from clearhead.inference.model_runner import ModelRunner
from clearhead.inference.output import GenerationOutput, length_penalty
from clearhead.inference.request import TokenIds, new_token_limits
from clearhead.inference.sampling import top_continuations
from clearhead.inference.token_buffer import TokenBuffer


class BeamSearch:
    """Beam search for a batch of rows; finished rows are removed and put into `outputs`."""

    def __init__(
        self,
        runner: ModelRunner,
        logits: Tensor,
        prompts: Sequence[TokenIds],
        config: GenerationConfig,
        eos_ids: Sequence[int],
    ):
        rows, beams, device = len(prompts), config.beam, runner.device
        self.runner, self.config = runner, config
        self.limits = new_token_limits(prompts, config.max_new_tokens, runner.network.config.max_positions)
        self.row_limits = torch.tensor(self.limits).to(device)  # (B,) of the rows still in the batch
        self.eos_ids = torch.tensor(eos_ids, dtype=torch.long).to(device)
        self.processors = build_processors(config, self.eos_ids)
        self.buffer = TokenBuffer(prompts, self.limits, logits.shape[-1], device)  # B·K rows, for the processors
        self.buffer.select(torch.arange(rows, device=device).repeat_interleave(beams))
        self.num_candidates = 2 * beams  # C: one EOS a beam, so at least K of them do not end
        self.logits = logits[:, None].expand(-1, beams, -1)  # (B, K, V)
        self.beam_scores = logits.new_full((rows, beams), -math.inf)  # (B, K) sums of logprobs
        self.beam_scores[:, 0] = 0  # all beams of a row start alike: the first stands for all
        self.tokens = torch.zeros(rows, beams, 0, dtype=torch.long, device=device)  # (B, K, new)
        self.token_logprobs = logits.new_zeros(rows, beams, 0)  # (B, K, new), if config.logprobs
        self.finished = FinishedHypotheses(rows, beams, logits)
        self.open = torch.ones(rows, dtype=torch.bool, device=device)  # (B,) whether a better hypothesis may come
        self.active, self.outputs = list(range(rows)), dict[int, list[GenerationOutput]]()
        self.num_new, self.sync_interval = 0, sync_interval(device)
        runner.start_beams(beams, max(self.limits))

    def run(self) -> list[list[GenerationOutput]]:
        """Search until every row is finished; return the n-best hypotheses in the order of the prompts."""
        while True:
            parents = self._advance()
            if not self.active:
                return [self.outputs[index] for index in sorted(self.outputs)]
            self.runner.reorder_beams(parents)
            self.logits = self.runner.decode_step(self.tokens[:, :, -1])

    def _advance(self) -> Tensor:
        """Extend the beams by one token and collect finished hypotheses; return the parent beams (B, K)."""
        scores, logprobs, parents, tokens = self._candidates()
        self.num_new += 1
        at_eos = (tokens[..., None] == self.eos_ids).any(dim=-1)  # (B, C)
        ended = at_eos | (self.row_limits <= self.num_new)[:, None]
        self._add_finished(scores, logprobs, parents, tokens, at_eos, ended)
        self.beam_scores, best = scores.masked_fill(ended, -math.inf).topk(self.config.beam, dim=1)  # (B, K)
        parents, tokens, logprobs = (x.gather(1, best) for x in (parents, tokens, logprobs))
        self.tokens, self.token_logprobs = self._extend(parents, tokens, logprobs)
        if self.processors:
            first_beam = torch.arange(len(parents), device=parents.device)[:, None] * self.config.beam
            self.buffer.select((first_beam + parents).flatten())
            self.buffer.append(tokens.flatten())
        self._update_open()
        at_limit = any(self.limits[index] == self.num_new for index in self.active)
        if at_limit or self.num_new % self.sync_interval == 0:
            return self._remove_finished(parents, at_limit)
        return parents

    def _candidates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the C best continuations, best first: sums, logprobs of the token, parent beams and tokens (B, C)."""
        logits = self.logits.flatten(0, 1).contiguous()  # (B·K, V), not used elsewhere
        logprobs = torch.log_softmax(logits, -1, out=logits if logits.is_cpu else None)
        for process in self.processors:
            logprobs = process(logprobs, self.buffer)
        if len(self.eos_ids) > 1:  # keep the best EOS of each beam: the others end the same text again
            ends = logprobs[:, self.eos_ids]  # (B·K, number of EOS ids)
            best = ends.argmax(dim=1, keepdim=True)
            logprobs[:, self.eos_ids] = torch.full_like(ends, -math.inf).scatter(1, best, ends.gather(1, best))
        logprobs = logprobs.unflatten(0, self.beam_scores.shape)  # (B, K, V)
        scores, beams, tokens = top_continuations(logprobs, self.beam_scores, self.num_candidates)
        return scores, logprobs.flatten(1).gather(1, beams * logprobs.shape[2] + tokens), beams, tokens

    def _extend(self, parents: Tensor, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Append one token to the parent beams (B, N): tokens and logprobs (B, N, new)."""
        tokens = torch.cat([_take_beams(self.tokens, parents), tokens[:, :, None]], dim=2)
        if self.config.logprobs:
            return tokens, torch.cat([_take_beams(self.token_logprobs, parents), logprobs[:, :, None]], dim=2)
        return tokens, self.token_logprobs[:, :1].expand(-1, tokens.shape[1], -1)

    def _add_finished(
        self, scores: Tensor, logprobs: Tensor, parents: Tensor, tokens: Tensor, at_eos: Tensor, ended: Tensor
    ) -> None:
        """Add those of the best K candidates that have ended to the finished hypotheses of open rows."""
        first = slice(self.config.beam)
        finishes = ended[:, first] & self.open[:, None]
        if finishes.is_cpu and not finishes.any():  # on a GPU this check would cost more than the merge
            return
        penalized = scores[:, first] / length_penalty(self.config, self.num_new)
        hypotheses = self._extend(parents[:, first], tokens[:, first], logprobs[:, first])
        self.finished.merge(penalized.masked_fill(~finishes, -math.inf), at_eos[:, first], *hypotheses)

    def _update_open(self) -> None:
        """Close rows that cannot improve, by the rule of `early_stopping`, or that are at their limit."""
        worst = self.finished.scores[:, -1]  # -inf while there are fewer than K
        if self.config.early_stopping == "never" and self.config.length_penalty > 0:
            best = self.beam_scores[:, 0] / length_penalty(self.config, self.row_limits.to(self.beam_scores.dtype))
        else:
            best = self.beam_scores[:, 0] / length_penalty(self.config, self.num_new)
        can_improve = worst.isneginf() if self.config.early_stopping == "full" else best > worst
        self.open = self.open & can_improve & (self.row_limits > self.num_new)

    def _remove_finished(self, parents: Tensor, at_limit: bool) -> Tensor:
        """Remove closed rows if few open ones are left, or if a row is at its limit; return the parents that remain."""
        is_open = self.open.tolist()
        num_open = is_open.count(True)
        if num_open and not at_limit and num_open > COMPACT_THRESHOLD * len(is_open):
            return parents
        for row in (row for row, still_open in enumerate(is_open) if not still_open):
            self.outputs[self.active[row]] = self.finished.outputs(row, self.config)
        kept = [row for row, still_open in enumerate(is_open) if still_open]
        self.active = [self.active[row] for row in kept]
        if not 0 < num_open < len(is_open):
            return parents
        rows = torch.tensor(kept).to(self.runner.device)
        self.runner.select(rows)
        self.finished.select(rows)
        if self.processors:
            beams = torch.arange(self.config.beam, device=rows.device)
            self.buffer.select((rows[:, None] * self.config.beam + beams).flatten())
        self.row_limits, self.open, self.beam_scores = self.row_limits[rows], self.open[rows], self.beam_scores[rows]
        self.tokens, self.token_logprobs = self.tokens[rows], self.token_logprobs[rows]
        return parents[rows]


class FinishedHypotheses:
    """The K best finished hypotheses of each row, best first; unused entries have the score -inf."""

    def __init__(self, rows: int, beams: int, logits: Tensor):
        self.scores = logits.new_full((rows, beams), -math.inf)
        self.at_eos = torch.zeros(rows, beams, dtype=torch.bool, device=logits.device)
        self.tokens = torch.zeros(rows, beams, 0, dtype=torch.long, device=logits.device)  # (B, K, new), padded with -1
        self.logprobs = logits.new_zeros(rows, beams, 0)

    def merge(self, scores: Tensor, at_eos: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Add candidates (B, K) with tokens and logprobs (B, K, new), and keep the K highest scores of each row.

        Candidates that have not finished have the score -inf. A full list drops its worst entries.
        """
        self.scores, best = torch.cat([self.scores, scores], dim=1).topk(self.scores.shape[1], dim=1)
        self.at_eos = torch.cat([self.at_eos, at_eos], dim=1).gather(1, best)
        old_tokens = F.pad(self.tokens, (0, tokens.shape[2] - self.tokens.shape[2]), value=-1)
        old_logprobs = F.pad(self.logprobs, (0, logprobs.shape[2] - self.logprobs.shape[2]))
        self.tokens = _take_beams(torch.cat([old_tokens, tokens], dim=1), best)
        self.logprobs = _take_beams(torch.cat([old_logprobs, logprobs], dim=1), best)

    def select(self, rows: Tensor) -> None:
        """Keep or reorder rows: row n becomes the old row rows[n]."""
        self.scores, self.at_eos = self.scores[rows], self.at_eos[rows]
        self.tokens, self.logprobs = self.tokens[rows], self.logprobs[rows]

    def outputs(self, row: int, config: GenerationConfig) -> list[GenerationOutput]:
        """Return the n-best outputs of one row."""
        outputs = []
        for score, at_eos, tokens, logprobs in zip(
            self.scores[row].tolist(),
            self.at_eos[row].tolist(),
            self.tokens[row].tolist(),
            self.logprobs[row].tolist(),
            strict=True,
        ):
            length = tokens.index(-1) if -1 in tokens else len(tokens)
            ids = tokens[: length - 1 if at_eos else length]
            if score > -math.inf:
                outputs.append(GenerationOutput(ids, at_eos, score, logprobs[:length] if config.logprobs else None))
        return outputs[: config.n_best] or [GenerationOutput([], False, -math.inf)]


def _take_beams(x: Tensor, beams: Tensor) -> Tensor:
    """Gather beams (B, N) from x (B, K, new): (B, N, new)."""
    return x.gather(1, beams[:, :, None].expand(-1, -1, x.shape[2]))
