"""The engine: continuous batching, where requests join and leave a running batch at every step.

A plain object without a thread: `submit` queues a request, `step` computes one token of every running request and a
chunk of the prompts that are new, `cancel` frees a request's pages at once; a loop, a thread (`EngineThread`) or a
server drives it. The output of a request never depends on the others, nor does its error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from clearhead.config import EngineConfig, GenerationConfig
from clearhead.errors import UserError
from clearhead.inference.batch_state import BatchState, Numbers
from clearhead.inference.logits_processors import process_rows
from clearhead.inference.make_runner import StepNetwork, make_runner
from clearhead.inference.page_pool import PagePool, pages_for
from clearhead.inference.request import (
    Constraint,
    EngineRequest,
    EosIds,
    TokenIds,
    check_seeds,
    eos_tuple,
    new_token_limits,
    validate,
)
from clearhead.inference.sampling import token_logprobs
from clearhead.inference.scheduler import Chunk, Row, Scheduler
from clearhead.inference.step import EncodeInputs, SamplingInputs, StepHandle, StepInputs, StepOutput, StepRunner
from clearhead.inference.stop_strings import StopStrings
from clearhead.text import Tokenizer

CPU_PREFILL_TOKENS, PREFILL_TOKENS = 512, 4096  # of a step by default


class QueueFull(RuntimeError):
    """The queue of waiting requests is full; try again later."""


class Launch(NamedTuple):
    """A launched step, whose tokens are to be read."""

    rows: list[Row]  # one for each output
    handle: StepHandle


class Done(NamedTuple):
    """The handle of a step whose tokens are on the host."""

    output: StepOutput

    def result(self) -> StepOutput:
        """Return the tokens."""
        return self.output


@dataclass
class EngineStats:
    """What an engine does now, and has done so far."""

    queued: int
    running: int
    pages_used: int
    pages_free: int
    steps: int = 0
    prompt_tokens: int = 0  # computed, without those whose pages were known
    cached_prompt_tokens: int = 0  # of known pages
    new_tokens: int = 0
    preemptions: int = 0


class Engine:
    """Continuous batching of requests with their own options; memory and queue are bounded by the config."""

    def __init__(
        self,
        network: StepNetwork,
        *,
        eos_ids: EosIds,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        runner: StepRunner | None = None,
    ):
        self.model, self.tokenizer, self.config = network.config, tokenizer, config or EngineConfig()
        self.eos_ids = eos_tuple(eos_ids)
        pages, rows = pages_for(self.config.cache_tokens) + 1, self.config.max_batch_size
        self.runner = runner or make_runner(network, pages, rows)
        self._device = self.runner.cache.device
        self._eos = torch.tensor(self.eos_ids, dtype=torch.long).to(self._device)
        default = CPU_PREFILL_TOKENS if self._device.type == "cpu" else PREFILL_TOKENS
        self.prefill_tokens = self.config.prefill_tokens or default
        self.pool = PagePool(self.runner.cache.pages)
        self.scheduler = Scheduler(self.pool, min(rows, self.runner.max_rows))
        self._batch = BatchState(self.model, self.runner.max_rows)
        self._decoding: list[Row] | None = None  # rows whose prompt is computed; None: to be found again
        self._numbers: Numbers = np.zeros(0, np.int32)  # of these
        self._in_flight: list[Launch] = []
        self._stats = EngineStats(0, 0, 0, 0)

    @property
    def waiting(self) -> deque[EngineRequest]:
        """The queued requests, the next one first."""
        return self.scheduler.waiting

    @property
    def running(self) -> list[EngineRequest]:
        """The admitted requests, the first one first."""
        return [row.request for row in self.scheduler.rows]

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.scheduler.rows or self.scheduler.waiting)

    @property
    def stats(self) -> EngineStats:
        """Counters, for metrics."""
        return replace(
            self._stats,
            queued=len(self.waiting),
            running=len(self.scheduler.rows),
            pages_used=self.pool.used,
            pages_free=self.pool.available,
            preemptions=self.scheduler.preemptions,
        )

    def submit(
        self,
        prompt: TokenIds,
        config: GenerationConfig,
        *,
        seed: int = 0,
        source: TokenIds | None = None,
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        text: bool = True,
    ) -> EngineRequest:
        """Queue a request; for a translator, `source` is the source and the prompt starts with BOS.

        Its text is decoded with every token unless `text` is False and there are no stop strings.
        Raises QueueFull if too many requests are waiting, and UserError if the request can never be served.
        """
        if config.beam > 1 or config.samples > 1 or config.align:
            raise UserError(
                "a request decodes one sequence, greedily or by sampling; use beam=1, samples=1, align=false"
            )
        if stop and self.tokenizer is None:
            raise ValueError("stop strings need an engine with a tokenizer")
        check_seeds([seed])
        validate(self.model, [prompt], None if source is None else [source], config, self.eos_ids)
        [limit] = new_token_limits([prompt], config.max_new_tokens, self.model.max_positions)
        request = EngineRequest(prompt, source, config, seed, limit, constraint)
        if pages_for(request.max_cache_tokens) + pages_for(len(source or ())) > self.pool.size:
            raise UserError(
                f"the request may need {request.max_cache_tokens + len(source or ())} tokens of the KV cache, but "
                f"cache_tokens is {self.config.cache_tokens}; shorten it, or lower max_new_tokens"
            )
        if len(self.waiting) >= self.config.max_queue:
            raise QueueFull(f"{len(self.waiting)} requests are waiting already")
        if self.tokenizer is not None and (text or stop):
            request.detokenizer = StopStrings(stop, self.tokenizer).detokenizer()
        self.waiting.append(request)
        return request

    def cancel(self, request: EngineRequest) -> None:
        """Cancel a request and free its pages at once; a request that is done stays as it is."""
        if request.done:
            return
        request.cancelled = True
        if row := next((row for row in self.scheduler.rows if row.request is request), None):
            self._release(row)
        else:
            self.waiting.remove(request)

    @torch.inference_mode()
    def step(self) -> list[EngineRequest]:
        """Compute the next token of every running request, and the next chunk of prompts.

        Returns the requests that got a token or failed; if the runner is asynchronous, by the step before.
        """
        self._stats.steps += 1
        advanced: list[EngineRequest] = []
        if self._in_flight and self._must_read():
            advanced += self._read()
        numbers = self._reserve(advanced)
        launches = self._launch(numbers, None) if len(numbers) else []
        launches += self._prefill(advanced)
        if self.runner.asynchronous:
            launches, self._in_flight = self._in_flight, launches
        return advanced + self._finish(launches)

    def _must_read(self) -> bool:
        """Return whether the next step needs the tokens of the last one on the host."""
        self._find_decoding()
        return bool(self._batch.is_processed[self._numbers].any())

    def _find_decoding(self) -> None:
        if self._decoding is None:
            self._decoding = [row for row in self.scheduler.rows if not row.is_prefilling]
            self._numbers = np.array([row.number for row in self._decoding], np.int32)

    def _reserve(self, advanced: list[EngineRequest]) -> Numbers:
        """Allocate the page of the next token of every row that decodes; return the numbers of these rows."""
        batch = self._batch
        while True:
            self._find_decoding()
            numbers = self._numbers
            unfinished = batch.num_new[numbers] < batch.limits[numbers]  # others wait until their tokens are read
            if not unfinished.all():
                numbers = numbers[unfinished]
            full = numbers[batch.cached[numbers] == batch.slots[numbers]]
            if len(full) <= self.pool.available:
                break
            if self._in_flight:
                advanced += self._read()
            else:
                row = self.scheduler.rows[-1]
                self._release(row)
                self.scheduler.requeue(row)
        if len(full):
            rows = {row.number: row for row in self.scheduler.rows}
            for number in full.tolist():
                batch.grow(rows[number], self.scheduler.grow(rows[number]))
        return numbers

    def _prefill(self, failed: list[EngineRequest]) -> list[Launch]:
        """Admit requests and launch chunks of prompts."""
        scheduler = self.scheduler
        left = self.prefill_tokens - sum(len(row.prompt) - row.cached for row in scheduler.rows if row.is_prefilling)
        admitted = scheduler.admit(left) if scheduler.waiting else []
        for row in admitted:
            self._batch.start(row)
            self._stats.cached_prompt_tokens += row.cached
            if self._batch.has_penalties(row):
                self.runner.start_row(row.number, list(row.request.prompt), row.request.ids)
        if encoding := [row for row in admitted if row.must_encode]:
            failed += self._encode(encoding)
        chunks = scheduler.chunks(self.prefill_tokens)
        return self._launch(np.array([chunk.row.number for chunk in chunks], np.int32), chunks) if chunks else []

    def _encode(self, rows: list[Row]) -> list[EngineRequest]:
        """Run the encoder on the sources of rows; return the requests that failed."""
        inputs = EncodeInputs([list(row.request.source or ()) for row in rows], [row.source_pages for row in rows])
        try:
            self.runner.encode(inputs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            torch.cuda.empty_cache()
            if len(rows) > 1:
                return self._encode(rows[: len(rows) // 2]) + self._encode(rows[len(rows) // 2 :])
            sharing = [row for row in self.scheduler.rows if row.source_pages == rows[0].source_pages]
            return [self._fail(row, out_of_memory(error)) for row in sharing]
        return []

    def _launch(self, numbers: Numbers, chunks: list[Chunk] | None) -> list[Launch]:
        """Launch a step: the next tokens of some rows, or chunks of prompts."""
        batch = self._batch
        inputs = batch.decode_inputs(numbers) if chunks is None else batch.chunk_inputs(chunks)
        chosen = numbers if chunks is None else numbers[inputs.rows[inputs.outputs]]
        sampling = batch.sampling(chosen)
        rows = self._rows_of(chosen)
        try:
            if batch.is_processed[chosen].any():
                handle: StepHandle = self._choose_processed(inputs, sampling, rows)
            else:
                handle = self.runner.launch(inputs, sampling)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return self._launch_less(numbers, chunks, error)
        if chunks is None:
            batch.cached[numbers] += 1
        else:
            for chunk in chunks:
                self.scheduler.advance(chunk)
                batch.cached[chunk.row.number] = chunk.row.cached
                self._stats.prompt_tokens += chunk.length
            if rows:
                self._decoding = None
        batch.chosen(chosen)
        return [Launch(rows, handle)]

    def _rows_of(self, numbers: Numbers) -> list[Row]:
        if self._decoding is not None and numbers is self._numbers:
            return self._decoding
        rows = {row.number: row for row in self.scheduler.rows}
        return [rows[number] for number in numbers.tolist()]

    def _launch_less(self, numbers: Numbers, chunks: list[Chunk] | None, error: Exception) -> list[Launch]:
        """Out of memory: launch the halves of a step; a row that does not fit alone fails."""
        torch.cuda.empty_cache()
        if len(numbers) == 1:
            [row] = self._rows_of(numbers)
            self._fail(row, out_of_memory(error))
            return [Launch([row], Done(StepOutput([0], [True])))]  # only to report it
        half = len(numbers) // 2
        first, second = (None, None) if chunks is None else (chunks[:half], chunks[half:])
        return self._launch(numbers[:half], first) + self._launch(numbers[half:], second)

    def _choose_processed(self, inputs: StepInputs, sampling: SamplingInputs, rows: list[Row]) -> Done:
        """Run a step, change the logits of requests that ask for it, and choose the tokens."""
        logits = self.runner.logits(inputs)
        raw = logits.clone() if sampling.logprobs >= 0 else logits
        errors = process_rows(logits, [row.request for row in rows], self._eos)
        for index, error in errors.items():
            self._fail(rows[index], error)
            logits[index] = 0  # any token
        output = self.runner.choose(logits, replace(sampling, logprobs=-1))
        if sampling.logprobs >= 0:
            tokens = torch.tensor(output.tokens, device=raw.device)
            values = [None if x is None else x.tolist() for x in token_logprobs(raw, tokens, sampling.logprobs)]
            output = StepOutput(output.tokens, output.finite, *values)
        return Done(output)

    def _read(self) -> list[EngineRequest]:
        """Read the tokens of all launched steps."""
        launches, self._in_flight = self._in_flight, []
        return self._finish(launches)

    def _finish(self, launches: list[Launch]) -> list[EngineRequest]:
        """Append the tokens of launched steps; return the requests that got one or failed."""
        advanced: list[EngineRequest] = []
        for rows, handle in launches:
            output = handle.result()
            for index, (row, token) in enumerate(zip(rows, output.tokens, strict=True)):
                request = row.request
                if row.closed:  # it ended while this step ran, or failed in it
                    if request.error is not None and request not in advanced:
                        advanced.append(request)
                    continue
                advanced.append(request)
                if not output.finite[index]:
                    self._fail(
                        row, UserError("the logits are NaN or all -inf; check the weights, or use another dtype")
                    )
                    continue
                self._append(request, index, output)
                self._stats.new_tokens += 1
                if request.done:
                    self._release(row)
                elif not self.runner.asynchronous:
                    self._batch.next_ids[row.number] = token
        return advanced

    def _append(self, request: EngineRequest, index: int, output: StepOutput) -> None:
        """Append a token of a step to its request."""
        wanted = request.wanted_logprobs
        if wanted >= 0 and output.logprobs is not None:
            request.logprobs.append(output.logprobs[index])
            if wanted > 0 and output.top_tokens is not None and output.top_logprobs is not None:
                top = zip(output.top_tokens[index][:wanted], output.top_logprobs[index][:wanted], strict=True)
                request.top_logprobs.append(list(top))
        request.append(output.tokens[index], self.eos_ids)

    def _fail(self, row: Row, error: Exception) -> EngineRequest:
        row.request.error = error
        self._release(row, failed=True)
        return row.request

    def _release(self, row: Row, failed: bool = False) -> None:
        row.cached = int(self._batch.cached[row.number])
        self.scheduler.release(row, failed)
        self._decoding = None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of a step says that there is no memory for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def out_of_memory(error: Exception) -> UserError:
    """Return the error of a request that does not fit into memory."""
    return UserError(f"out of memory: shorten the request, or lower cache_tokens ({error})")
