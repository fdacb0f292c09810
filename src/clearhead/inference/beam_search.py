"""Beam search.   B batch · K beams · C candidates · V vocabulary

The beams of a row share the slots of their common past in the KV cache: the source and the prompt are stored once, and
reordering the beams copies their tables, not the cache. The rules are those of transformers: the best K candidates may
finish, the best K unfinished candidates continue, and the length of a finished hypothesis includes EOS. Only the logits
are on the device of the network; all that follows is small, and in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.config import GenerationConfig
from clearhead.errors import UserError
from clearhead.inference.logits_processors import build_processors
from clearhead.inference.output import GenerationOutput, length_penalty
from clearhead.inference.request import TokenIds
from clearhead.inference.step import StepRunner
from clearhead.inference.step_batch import Ints, StepBatch
from clearhead.inference.token_buffer import TokenBuffer
from clearhead.ops.top_logprobs import top_logprobs, top_values

Floats = NDArray[Any]
Bools = NDArray[np.bool_]


class BeamSearch:
    """Beam search for a batch of rows; finished rows are removed and put into `outputs`."""

    def __init__(
        self,
        runner: StepRunner,
        prompts: Sequence[TokenIds],
        sources: Sequence[TokenIds] | None,
        config: GenerationConfig,
        limits: Sequence[int],
        eos_ids: Sequence[int],
    ):
        rows, beams = len(prompts), config.beam
        self.config, self.limits = config, np.array(limits)  # (B,) new tokens of each row
        self.eos_ids = np.array(eos_ids, np.int32)
        self.batch = StepBatch(runner, prompts, sources)
        self.logits = self.batch.prefill()  # (B, V) first, as all beams of a row start alike, then (B·K, V)
        device, dtype = self.logits.device, torch.empty(0, dtype=self.logits.dtype).numpy().dtype
        self.processors = build_processors(config, torch.tensor(eos_ids, dtype=torch.long).to(device))
        self.buffer = TokenBuffer(prompts, limits, self.logits.shape[1], device)  # for the processors
        self.beam_scores = np.full((rows, beams), -np.inf, dtype)  # (B, K) sums of logprobs
        self.beam_scores[:, 0] = 0  # the first beam stands for all
        self.tokens = np.zeros((rows, beams, 0), np.int32)  # (B, K, new)
        self.token_logprobs = np.zeros((rows, beams, 0), dtype)  # (B, K, new), if config.logprobs
        self.finished = FinishedHypotheses(rows, beams, dtype)
        self.open = np.ones(rows, bool)  # (B,) whether a better hypothesis may come
        self.active, self.outputs = np.arange(rows), dict[int, list[GenerationOutput]]()
        self.num_new = 0

    def run(self) -> list[list[GenerationOutput]]:
        """Search until every row is finished; return the n-best hypotheses in the order of the prompts."""
        while True:
            self._advance()
            if not len(self.active):
                return [self.outputs[index] for index in sorted(self.outputs)]
            self.logits = self.batch.step(self.tokens[:, :, -1].reshape(-1, 1))

    def _advance(self) -> None:
        """Extend the beams by one token, collect finished hypotheses and remove the rows that are closed."""
        scores, logprobs, parents, tokens = self._candidates()
        self.num_new += 1
        at_eos = self._is_eos(tokens)
        ended = at_eos | (self.limits <= self.num_new)[:, None]
        self._add_finished(scores, logprobs, parents, tokens, at_eos, ended)
        best = np.argsort(ended, axis=1, kind="stable")[:, : self.config.beam]  # candidates are sorted: the best ones
        scores = np.where(ended, -np.inf, scores)
        scores, logprobs, parents, tokens = (_take(x, best) for x in (scores, logprobs, parents, tokens))
        self.beam_scores = scores.astype(self.beam_scores.dtype, copy=False)
        self.tokens, self.token_logprobs = self._extend(slice(None), parents, tokens, logprobs)
        self._update_open()
        self._continue(parents, tokens)

    def _candidates(self) -> tuple[Floats, Floats, Ints, Ints]:
        """Return the C best continuations, best first: sums, logprobs of the token, parent beams and tokens (B, C)."""
        rows, beams = self.beam_scores.shape
        count = min(2 * beams + max(len(self.eos_ids) - 1, 0), self.logits.shape[1])
        if self.processors:
            logprobs = torch.log_softmax(self.logits, -1, out=self.logits if self.logits.is_cpu else None)
            for process in self.processors:
                logprobs = process(logprobs, self.buffer)
            best = top_values(logprobs, count)
        else:
            best = top_logprobs(self.logits, count)
        values, tokens = (_on_host(x).reshape(rows, -1, count) for x in best)
        if np.isnan(values).any():
            raise UserError("the logits are NaN or all -inf; check the weights, or use another dtype")
        if len(self.eos_ids) > 1:  # keep the best EOS of each beam: the others end the same text again
            is_eos = self._is_eos(tokens)
            values = np.where(is_eos & (is_eos.cumsum(axis=2) > 1), -np.inf, values).astype(values.dtype, copy=False)
        sums = (self.beam_scores[:, :, None] + values).reshape(rows, -1)
        order = np.argsort(-sums, axis=1, kind="stable")[:, : 2 * beams]  # of equals, the first beam and token
        shape = (rows, beams, count)
        logprobs_of, ids = (_take(np.broadcast_to(x, shape).reshape(rows, -1), order) for x in (values, tokens))
        return _take(sums, order), logprobs_of, (order // count).astype(np.int32), ids.astype(np.int32)

    def _is_eos(self, tokens: Ints) -> Bools:
        result: Bools = (tokens[..., None] == self.eos_ids).any(axis=-1)
        return result

    def _extend(
        self, rows: slice | NDArray[np.intp], parents: Ints, tokens: Ints, logprobs: Floats
    ) -> tuple[Ints, Floats]:
        """Append one token to the parent beams (B, N) of some rows: tokens and logprobs (B, N, new)."""
        paths = np.concatenate([_take(self.tokens[rows], parents), tokens[:, :, None]], axis=2)
        if not self.config.logprobs:
            return paths, self.token_logprobs[rows]
        past = _take(self.token_logprobs[rows], parents)
        return paths, np.concatenate([past, logprobs[:, :, None]], axis=2)

    def _add_finished(
        self, scores: Floats, logprobs: Floats, parents: Ints, tokens: Ints, at_eos: Bools, ended: Bools
    ) -> None:
        """Add those of the best K candidates that have ended to the finished hypotheses of open rows."""
        first = slice(self.config.beam)
        finishes = ended[:, first] & self.open[:, None]
        rows = np.flatnonzero(finishes.any(axis=1))
        if not len(rows):
            return
        parents, tokens, logprobs = (x[rows, first] for x in (parents, tokens, logprobs))
        paths = self._extend(rows, parents, tokens, logprobs)
        penalized = scores[rows, first] / length_penalty(self.config, self.num_new)
        self.finished.merge(rows, np.where(finishes[rows], penalized, -np.inf), at_eos[rows, first], *paths)

    def _update_open(self) -> None:
        """Close rows that cannot improve, by the rule of `early_stopping`, or that are at their limit."""
        worst = self.finished.scores[:, -1]  # -inf while there are fewer than K
        if self.config.early_stopping == "never" and self.config.length_penalty > 0:
            best = self.beam_scores[:, 0] / length_penalty(self.config, self.limits.astype(self.beam_scores.dtype))
        else:
            best = self.beam_scores[:, 0] / length_penalty(self.config, self.num_new)
        can_improve = np.isneginf(worst) if self.config.early_stopping == "full" else best > worst
        self.open = self.open & can_improve & (self.limits > self.num_new)

    def _continue(self, parents: Ints, tokens: Ints) -> None:
        """Let the beams (B, K) of open rows continue their parents; remove the closed rows."""
        first_step = self.num_new == 1
        flat = np.arange(len(parents))[:, None] * (1 if first_step else self.config.beam)
        flat = np.broadcast_to(flat, parents.shape) if first_step else flat + parents
        kept = np.flatnonzero(self.open)
        if len(kept) < len(self.open):
            for row in np.flatnonzero(~self.open).tolist():
                self.outputs[int(self.active[row])] = self.finished.outputs(row, self.config)
            flat, tokens = flat[kept], tokens[kept]
            self.finished.select(kept)
            self.active, self.limits, self.open = self.active[kept], self.limits[kept], self.open[kept]
            self.beam_scores, self.tokens = self.beam_scores[kept], self.tokens[kept]
            self.token_logprobs = self.token_logprobs[kept]
        if first_step or len(kept) < len(parents):
            self.batch.select(flat.ravel())
        else:
            self.batch.reorder(flat.ravel())
        if self.processors and len(kept):
            self.buffer.select(torch.from_numpy(flat.ravel()).to(self.logits.device))
            self.buffer.append(torch.from_numpy(tokens.ravel()).to(self.logits.device).long())


class FinishedHypotheses:
    """The K best finished hypotheses of each row, best first; unused entries have the score -inf."""

    def __init__(self, rows: int, beams: int, dtype: Any):
        self.scores = np.full((rows, beams), -np.inf, dtype)
        self.at_eos = np.zeros((rows, beams), bool)
        self.tokens = np.zeros((rows, beams, 0), np.int32)  # (B, K, new or more), padded with -1
        self.logprobs = np.zeros((rows, beams, 0), dtype)

    def merge(self, rows: NDArray[np.intp], scores: Floats, at_eos: Bools, tokens: Ints, logprobs: Floats) -> None:
        """Add candidates (N, K) of N rows with tokens and logprobs (N, K, new), and keep the K highest scores of each.

        Candidates that have not finished have the score -inf. A full list drops its worst entries.
        """
        self.tokens, self.logprobs = _widen(self.tokens, tokens, -1), _widen(self.logprobs, logprobs, 0)
        scores = np.concatenate([self.scores[rows], scores], axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.scores.shape[1]]
        self.scores[rows] = _take(scores, best)
        self.at_eos[rows] = _take(np.concatenate([self.at_eos[rows], at_eos], axis=1), best)
        for x, new, padding in ((self.tokens, tokens, -1), (self.logprobs, logprobs, 0)):
            padded = np.full((len(rows), new.shape[1], x.shape[2]), padding, x.dtype)
            padded[:, :, : new.shape[2]] = new
            x[rows] = _take(np.concatenate([x[rows], padded], axis=1), best)

    def select(self, rows: NDArray[np.intp]) -> None:
        """Keep some rows."""
        self.scores, self.at_eos = self.scores[rows], self.at_eos[rows]
        self.tokens, self.logprobs = self.tokens[rows], self.logprobs[rows]

    def outputs(self, row: int, config: GenerationConfig) -> list[GenerationOutput]:
        """Return the n-best outputs of one row."""
        outputs = []
        for beam, score in enumerate(self.scores[row, : config.n_best].tolist()):
            if score == -np.inf:
                break
            at_eos, tokens = bool(self.at_eos[row, beam]), self.tokens[row, beam]
            length = int((tokens >= 0).sum())
            logprobs = self.logprobs[row, beam, :length].tolist() if config.logprobs else None
            outputs.append(GenerationOutput(tokens[: length - at_eos].tolist(), at_eos, score, logprobs))
        return outputs or [GenerationOutput([], False, -np.inf)]


def _on_host(x: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = x.cpu().numpy()
    return array


def _take(x: NDArray[Any], beams: NDArray[np.integer[Any]]) -> NDArray[Any]:
    """Gather beams or candidates (B, N) from x (B, K, …): (B, N, …)."""
    taken: NDArray[Any] = x[np.arange(len(x))[:, None], beams]
    return taken


def _widen(x: NDArray[Any], new: NDArray[Any], padding: int) -> NDArray[Any]:
    """Make room for paths as long as the new ones, and some longer ones."""
    if x.shape[2] >= new.shape[2]:
        return x
    wider = np.full((*x.shape[:2], 2 * new.shape[2]), padding, x.dtype)
    wider[:, :, : x.shape[2]] = x
    return wider
