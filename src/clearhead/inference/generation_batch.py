"""Greedy search and sampling for a batch of rows.   B batch · N tokens of a step · V vocabulary"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference.logits_processors import build_processors
from clearhead.inference.output import GenerationOutput, make_output
from clearhead.inference.request import TokenIds, new_token_limits
from clearhead.inference.sampling import Sampler
from clearhead.inference.stop_strings import StopStrings
from clearhead.inference.token_buffer import TokenBuffer

COMPACT_THRESHOLD = 0.75  # finished rows are removed once at most this share of the batch is unfinished


def sync_interval(device: torch.device) -> int:
    """Return the number of steps between checks for finished rows, which synchronize with the device."""
    return 1 if device.type == "cpu" else 8


class BatchRunner(Protocol):
    """Decode steps of a batch."""

    config: ModelConfig
    device: torch.device

    def decode_step(self, ids: Tensor) -> Tensor:
        """Run the next tokens (B, T) of every row; return the logits (B, T, V)."""

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows: row n becomes the old row rows[n]."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Shorten each row to a number of tokens, prompt included."""


class GenerationBatch:
    """A batch of rows under greedy search or sampling; finished rows are removed and put into `outputs`."""

    def __init__(
        self,
        runner: BatchRunner,
        logits: Tensor,
        prompts: Sequence[TokenIds],
        config: GenerationConfig,
        eos_ids: Sequence[int],
        seeds: Sequence[int],
        stop_strings: StopStrings | None = None,
    ):
        device = runner.device
        self.runner, self.logits, self.config = runner, logits, config
        self.limits = new_token_limits(prompts, config.max_new_tokens, runner.config.max_positions)
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.buffer = TokenBuffer(prompts, self.limits, logits.shape[-1], device)
        self.eos_ids = torch.tensor(eos_ids, dtype=torch.long).to(device)
        self.seeds = torch.tensor(seeds).to(device)
        self.processors, self.sampler = build_processors(config, self.eos_ids), Sampler.from_config(config)
        self.finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.pending: Tensor | None = None  # (B,) the last tokens, not yet in the KV cache
        self.active = list(range(len(prompts)))  # original index of each row still in the batch
        self.num_new = [0] * len(prompts)  # new tokens of each of these
        self.outputs: dict[int, GenerationOutput] = {}
        self.sync_interval = 1 if stop_strings else sync_interval(device)
        self.detokenizers = [stop_strings.detokenizer() for _ in prompts] if stop_strings else []

    def run(self) -> list[GenerationOutput]:
        """Decode until every row is finished; return the outputs in the order of the prompts."""
        while self.active:
            self.advance()
        return [self.outputs[index] for index in sorted(self.outputs)]

    def advance(self) -> Tensor:
        """Decode one more token in every row; return the tokens (B, 1)."""
        if self.pending is not None:
            self.logits = self.runner.decode_step(self.pending[:, None])[:, 0]
        tokens = self.choose(self.logits)
        self.accept(tokens)
        return tokens[:, None]

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next token (B,) of each row from the model's logits (B, V)."""
        return self.sampler(self.process_logits(logits), self.seeds, self.buffer.num_new)

    def process_logits(self, logits: Tensor) -> Tensor:
        """Apply all processors to logits (B, V), in place unless the raw logits are needed for logprobs."""
        logits = logits.clone() if self.processors and self.config.logprobs else logits
        for process in self.processors:
            logits = process(logits, self.buffer)
        return logits

    def accept(self, tokens: Tensor) -> None:
        """Append these tokens (B,), update which rows are finished and remove those when it is time."""
        self.append(self.logits, tokens)
        self.finished = self.finished | self.is_eos(tokens)
        self.pending, self.num_new = tokens, [count + 1 for count in self.num_new]
        if self._any_at_limit() or self.num_new[0] % self.sync_interval == 0:
            self.remove_finished(tokens[:, None], [1] * len(self.num_new))

    def append(self, logits: Tensor, tokens: Tensor) -> None:
        """Append tokens (B,) to the buffer, with their logprobs under the unprocessed logits if config.logprobs."""
        logprobs = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0] if self.config.logprobs else None
        self.buffer.append(tokens, logprobs)

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Return which of the tokens are EOS tokens."""
        return (tokens[..., None] == self.eos_ids).any(dim=-1)

    def _any_at_limit(self) -> bool:
        return any(self.limits[index] == count for index, count in zip(self.active, self.num_new, strict=True))

    def remove_finished(self, tokens: Tensor, accepted: list[int]) -> None:
        """Remove finished rows if few unfinished ones are left, or if a row is at its length limit.

        Row n has just accepted the first accepted[n] of `tokens` (B, N), which are checked for stop strings.
        """
        finished = self.finished.tolist()
        if self.detokenizers:
            for row, (index, ids) in enumerate(zip(self.active, tokens.tolist(), strict=True)):
                finished[row] |= any(self.detokenizers[index].add(token) for token in ids[: accepted[row]])
        at_limit = [self.limits[index] == count for index, count in zip(self.active, self.num_new, strict=True)]
        done = [a or b for a, b in zip(finished, at_limit, strict=True)]
        unfinished = done.count(False)
        if unfinished and not any(at_limit) and unfinished > COMPACT_THRESHOLD * len(done):
            return
        for row in (row for row, is_done in enumerate(done) if is_done):
            self.outputs[self.active[row]] = self._output(row)
        kept = [row for row, is_done in enumerate(done) if not is_done]
        self.active, self.num_new = [self.active[row] for row in kept], [self.num_new[row] for row in kept]
        if 0 < unfinished < len(done):
            self.select(torch.tensor(kept).to(self.runner.device))

    def lengths(self) -> list[int]:
        """Return the number of tokens of each row, prompt included."""
        return [self.prompt_lengths[index] + count for index, count in zip(self.active, self.num_new, strict=True)]

    def select(self, rows: Tensor) -> None:
        """Keep or reorder rows: row n becomes the old row rows[n]."""
        self.runner.select(rows)
        self.buffer.select(rows)
        self.seeds, self.finished = self.seeds[rows], self.finished[rows]
        self.pending = None if self.pending is None else self.pending[rows]

    def _output(self, row: int) -> GenerationOutput:
        """Return the output of a finished row, without the tokens decoded after its end until the next check."""
        (ids, logprobs), eos_ids = self.buffer.new_tokens_of(row), set(self.eos_ids.tolist())
        stopped = self.detokenizers[self.active[row]].stopped if self.detokenizers else None
        eos = next((position for position, token in enumerate(ids) if token in eos_ids), None)
        if stopped is not None and (eos is None or stopped <= eos):
            ids, scored, finished = ids[:stopped], stopped, True
        elif eos is not None:
            ids, scored, finished = ids[:eos], eos + 1, True
        else:
            scored, finished = len(ids), False
        return make_output(ids, finished, logprobs[:scored], self.config)
