"""The batching engine: continuous batching, where requests join and leave a running batch at every step.

B batch · V vocabulary

A plain object without a thread: `submit` queues a request, `step` decodes one token in every row, `cancel` frees a row
at once; a loop, a thread (`EngineThread`) or a server drives it. The output of a request never depends on the others.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.config import EngineConfig, GenerationConfig
from clearhead.errors import UserError
from clearhead.inference.generate import EosIds, check_seeds, eos_tuple, validate
from clearhead.inference.logits_processors import LogitsProcessor, build_processors
from clearhead.inference.model_runner import GenerativeNetwork, ModelRunner, TokenIds, new_token_limits
from clearhead.inference.output import GenerationOutput, make_output
from clearhead.inference.sampling import Sampler
from clearhead.inference.stop_strings import IncrementalDetokenizer, StopStrings
from clearhead.inference.token_buffer import TokenBuffer
from clearhead.text import Tokenizer


class QueueFull(RuntimeError):
    """The queue of waiting requests is full; try again later."""


class Constraint(Protocol):
    """What a request may generate, like JSON that matches a schema."""

    def allowed(self, ids: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return which tokens (V,) may follow these new ones; None: all."""


class EngineRequest:
    """A request and its output so far: `ids` and `text` grow with every step until it is `done`."""

    constraint: Constraint | None = None
    error: BaseException | None = None  # why the request was cancelled, if it failed

    def __init__(self, prompt: TokenIds, source: TokenIds | None, config: GenerationConfig, seed: int, limit: int):
        self.prompt, self.source, self.config, self.seed, self.limit = prompt, source, config, seed, limit
        # Only what decides how tokens are chosen: requests for which it is equal are sampled together.
        self.sampling_config = config.model_copy(update={"max_new_tokens": 0, "logprobs": False, "top_logprobs": 0})
        self.ids: list[int] = []
        self.logprobs: list[float] = []  # of each id and of EOS, if config.logprobs
        self.top_logprobs: list[list[tuple[int, float]]] = []  # the most likely tokens, if config.top_logprobs
        self.output: GenerationOutput | None = None
        self.cancelled = False
        self.detokenizer: IncrementalDetokenizer | None = None  # if the engine has a tokenizer
        self._text_taken = 0

    @property
    def done(self) -> bool:
        """Whether the request is finished or cancelled."""
        return self.cancelled or self.output is not None

    @property
    def text(self) -> str:
        """The text that is final: no incomplete character, nothing that may be the beginning of a stop string."""
        return "" if self.detokenizer is None else self.detokenizer.text

    def take_text(self) -> str:
        """Return the text added since the last call."""
        text = self.text
        start, self._text_taken = self._text_taken, len(text)
        return text[start:]

    @property
    def max_cache_tokens(self) -> int:
        """Maximum number of tokens in the KV cache; the last new token is never cached."""
        return len(self.prompt) + self.limit - 1

    def append(self, token: int, eos_ids: Sequence[int], logprob: float | None) -> None:
        """Append a token; finish at EOS, at a stop string or at the length limit."""
        if logprob is not None:
            self.logprobs.append(logprob)
        finished = token in eos_ids
        if not finished:
            self.ids.append(token)
            finished = self.detokenizer is not None and self.detokenizer.add(token)
        if finished or len(self.ids) == self.limit:
            if self.detokenizer is not None:
                self.detokenizer.finish()
            # Set last: a reader on another thread that sees the output sees all of the text.
            self.output = make_output(self.ids, finished, self.logprobs, self.config)


class SamplingGroup(NamedTuple):
    """Rows of the batch with the same sampling options."""

    rows: Tensor  # (N,) indices
    sampler: Sampler
    processors: list[LogitsProcessor]


class Engine:
    """Continuous batching of requests with their own options; memory and queue are bounded by the config."""

    def __init__(
        self,
        network: GenerativeNetwork,
        *,
        eos_ids: EosIds,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
    ):
        self.network, self.tokenizer, self.config = network, tokenizer, config or EngineConfig()
        self.eos_ids = eos_tuple(eos_ids)
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []  # one for each row of the batch
        self._runner: ModelRunner | None = None  # None while no request is running
        self._buffer: TokenBuffer | None = None
        self._seeds = torch.zeros(0, dtype=torch.long)  # (B,)
        self._groups: list[SamplingGroup] = []
        ModelRunner(network, 0, 1)  # refuses a network in training mode now, not at the first request

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.running or self.waiting)

    def submit(
        self,
        prompt: TokenIds,
        config: GenerationConfig,
        *,
        seed: int = 0,
        source: TokenIds | None = None,
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
    ) -> EngineRequest:
        """Queue a request; for a translator, `source` is the source and the prompt starts with BOS.

        Raises QueueFull if too many requests are waiting, and UserError if the request can never be served.
        """
        if config.beam > 1 or config.samples > 1 or config.align:
            raise UserError(
                "a request decodes one sequence, greedily or by sampling; use beam=1, samples=1, align=false"
            )
        if stop and self.tokenizer is None:
            raise ValueError("stop strings need an engine with a tokenizer")
        check_seeds([seed])
        validate(self.network, [prompt], None if source is None else [source], config, self.eos_ids)
        [limit] = new_token_limits([prompt], config.max_new_tokens, self.network.config.max_positions)
        request = EngineRequest(prompt, source, config, seed, limit)
        if not self._fits([request]):
            raise UserError(
                f"the request may need {request.max_cache_tokens + len(source or ())} tokens of the KV cache, but "
                f"cache_tokens is {self.config.cache_tokens}; shorten it, or lower max_new_tokens"
            )
        if len(self.waiting) >= self.config.max_queue:
            raise QueueFull(f"{len(self.waiting)} requests are waiting already")
        request.constraint = constraint
        if self.tokenizer is not None:
            request.detokenizer = StopStrings(stop, self.tokenizer).detokenizer()
        self.waiting.append(request)
        return request

    def cancel(self, request: EngineRequest) -> None:
        """Cancel a request and free its row at once; a request that is done stays as it is."""
        if request.done:
            return
        request.cancelled = True
        if request in self.running:
            self._remove([self.running.index(request)])
        else:
            self.waiting.remove(request)

    @torch.inference_mode()
    def step(self) -> list[EngineRequest]:
        """Admit waiting requests that fit and decode one token in every row; return the requests that got one."""
        logits = [] if self._runner is None else [self._runner.decode_step(self._last_tokens())[:, 0]]
        if admitted := self._admit():
            logits.append(self._prefill(admitted))
        if not logits:
            return []
        self._append_tokens(torch.cat(logits))
        advanced = list(self.running)
        self._remove([row for row, request in enumerate(self.running) if request.done])
        return advanced

    def _fits(self, requests: Sequence[EngineRequest]) -> bool:
        """Return whether the KV cache can hold these requests, every row as long as the longest may get."""
        max_source = max(len(request.source or ()) for request in requests)
        return (
            len(requests) * (max(request.max_cache_tokens for request in requests) + max_source)
            <= self.config.cache_tokens
        )

    def _admit(self) -> list[EngineRequest]:
        """Take the requests that join now, strictly first come, first served, so that none starves."""
        admitted: list[EngineRequest] = []
        max_length = 0
        while self.waiting and len(self.running) + len(admitted) < self.config.max_batch_size:
            request = self.waiting[0]
            max_length = max(max_length, len(request.prompt), len(request.source or ()))
            if admitted and (len(admitted) + 1) * max_length > self.config.prefill_tokens:
                break
            if not self._fits([*self.running, *admitted, request]):
                break
            admitted.append(self.waiting.popleft())
        return admitted

    def _prefill(self, admitted: list[EngineRequest]) -> Tensor:
        """Prefill the admitted requests and add them to the batch; return the logits (B', V) after their prompts."""
        prompts = [request.prompt for request in admitted]
        sources = None if admitted[0].source is None else [request.source or () for request in admitted]
        capacity = max(request.max_cache_tokens for request in [*self.running, *admitted])
        runner = ModelRunner(self.network, len(admitted), capacity)
        logits = runner.prefill(prompts, sources)
        buffer = TokenBuffer(prompts, [request.limit for request in admitted], logits.shape[-1], runner.device)
        if self._runner is None or self._buffer is None:
            self._runner, self._buffer = runner, buffer
        else:
            self._runner.concat(runner, capacity)
            self._buffer.concat(buffer)
        self.running += admitted
        self._group_rows()
        return logits

    def _last_tokens(self) -> Tensor:
        """Return the last token of each row (B, 1), which is not in the KV cache yet."""
        assert self._runner is not None
        return torch.tensor([[request.ids[-1]] for request in self.running]).to(self._runner.device)

    def _append_tokens(self, logits: Tensor) -> None:
        """Choose the next token of each row from logits (B, V) and append it to its request."""
        assert self._buffer is not None
        tokens = self._choose(self._constrained(logits), self._buffer)
        self._buffer.append(tokens)
        logprobs: list[float | None] = [None] * len(self.running)
        if any(request.config.logprobs for request in self.running):
            values = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0].float().tolist()
            logprobs = [x if request.config.logprobs else None for x, request in zip(values, self.running, strict=True)]
        if count := max(request.config.top_logprobs for request in self.running):
            top = logits.float().log_softmax(dim=-1).topk(min(count, logits.shape[-1]))
            for request, *pair in zip(self.running, top.indices.tolist(), top.values.tolist(), strict=True):
                if request.config.top_logprobs:
                    request.top_logprobs.append(list(zip(*pair, strict=True))[: request.config.top_logprobs])
        for request, token, logprob in zip(self.running, tokens.tolist(), logprobs, strict=True):
            if not request.cancelled:
                request.append(token, self.eos_ids, logprob)

    def _constrained(self, logits: Tensor) -> Tensor:
        """Return logits (B, V) with -inf for the tokens that constraints exclude; a constraint that fails cancels."""
        if all(request.constraint is None for request in self.running):
            return logits
        logits = logits.clone()
        for row, request in enumerate(self.running):
            try:
                allowed = None if request.constraint is None else request.constraint.allowed(request.ids)
            except Exception as error:
                request.error, request.cancelled = error, True
                continue
            if allowed is not None:
                logits[row, ~torch.from_numpy(allowed).to(logits.device)] = -torch.inf
        return logits

    def _group_rows(self) -> None:
        """Group the rows of a changed batch by their sampling options."""
        assert self._runner is not None
        device, groups = self._runner.device, dict[GenerationConfig, list[int]]()
        for row, request in enumerate(self.running):
            groups.setdefault(request.sampling_config, []).append(row)
        eos_ids = torch.tensor(self.eos_ids, dtype=torch.long).to(device)
        self._seeds = torch.tensor([request.seed for request in self.running]).to(device)
        self._groups = [
            SamplingGroup(torch.tensor(rows).to(device), Sampler.from_config(config), build_processors(config, eos_ids))
            for config, rows in groups.items()
        ]

    def _choose(self, logits: Tensor, buffer: TokenBuffer) -> Tensor:
        """Return the next token (B,) of each row."""
        tokens = torch.empty_like(self._seeds)
        for rows, sampler, processors in self._groups:
            group_buffer, group_logits = copy.copy(buffer), logits
            if len(self._groups) > 1:
                group_buffer.select(rows)
                group_logits = logits[rows]
            elif processors:
                group_logits = logits.clone()
            for process in processors:
                group_logits = process(group_logits, group_buffer)
            tokens[rows] = sampler(group_logits, self._seeds[rows], group_buffer.num_new)
        return tokens

    @torch.inference_mode()
    def _remove(self, rows: list[int]) -> None:
        """Remove rows from the batch; the last rows take their indices."""
        if len(rows) == len(self.running):
            self.running, self._runner, self._buffer, self._groups = [], None, None, []
        if not rows or self._runner is None or self._buffer is None:
            return
        order = list(range(len(self.running)))
        for row in sorted(rows, reverse=True):
            self._runner.drop_row(row)
            order[row] = order[-1]
            order.pop()
        self.running = [self.running[row] for row in order]
        self._buffer.select(torch.tensor(order).to(self._runner.device))
        lengths = [len(request.prompt) + len(request.ids) for request in self.running]
        self._buffer.max_length = max(lengths)
        self._runner.rewind([length - 1 for length in lengths])  # the last token is not in the KV cache yet
        self._group_rows()


def run_in_order(engine: Engine, requests: Iterable[EngineRequest | None]) -> Iterator[EngineRequest]:
    """Step the engine and yield finished requests in the order of submission.

    Advancing `requests` submits the next one. Only enough of them to keep the rows busy are in flight, so a stream of
    any length takes little memory. None means that no request is available now, and the others continue. An error from
    `requests` is raised after all requests before it are finished.
    """
    max_in_flight = min(4 * engine.config.max_batch_size, engine.config.max_queue)
    source, in_flight = iter(requests), deque[EngineRequest]()
    more, failure = True, None
    try:
        while more or in_flight:
            try:
                while more and len(in_flight) < max_in_flight and (request := next(source)) is not None:
                    in_flight.append(request)
            except StopIteration:
                more = False
            except Exception as error:
                more, failure = False, error
            if in_flight:
                engine.step()
            while in_flight and in_flight[0].done:
                yield in_flight.popleft()
        if failure is not None:
            raise failure
    finally:  # the consumer stopped early
        for request in in_flight:
            engine.cancel(request)
