"""The batching engine: requests join and leave a running batch at every step.   B rows · V words

A plain object that does nothing by itself: `submit` queues a request, `step` writes one more token in every row of the
batch, `cancel` frees a row at once; a loop, a thread or a server drives it. A request's text is the one that it would
get alone: rows share the reading of the weights, and nothing else.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.config import EngineConfig, GenerationConfig
from clearhead.errors import UserError
from clearhead.inference.generate import EosIds, check, check_seeds
from clearhead.inference.logits_processors import Processor, processors
from clearhead.inference.output import GenerationOutput, scored
from clearhead.inference.sampling import Sampler
from clearhead.inference.step import Ids, Step, Writer, limits
from clearhead.inference.stop_strings import StopStrings, Watcher
from clearhead.inference.token_buffer import TokenBuffer
from clearhead.text import Tokenizer


class QueueFull(RuntimeError):
    """As many requests wait as may; try again when some are done."""


class Job:
    """A request and what has come of it: `ids` and `text` grow with every step until it is `done`."""

    def __init__(self, prompt: Ids, source: Ids | None, config: GenerationConfig, seed: int, limit: int):
        self.prompt, self.source, self.config, self.seed, self.limit = prompt, source, config, seed, limit
        self.rules = config.model_copy(update={"max_new_tokens": 0, "scores": False})  # how words are chosen, no more
        self.ids: list[int] = []
        self.chances: list[float] = []  # of each id and of the end, where config.scores asks for them
        self.output: GenerationOutput | None = None
        self.cancelled = False
        self.watcher: Watcher | None = None  # where the engine has a tokenizer
        self._taken = 0

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.cancelled or self.output is not None

    @property
    def text(self) -> str:
        """What of the text is sure to stay: no unfinished character, nothing that may begin a stop string."""
        return "" if self.watcher is None else self.watcher.text

    def take(self) -> str:
        """The text that has come since this was last asked."""
        text = self.text
        begun, self._taken = self._taken, len(text)
        return text[begun:]

    @property
    def slots(self) -> int:
        """Tokens that the cache has to hold at the most; the last one written is never read."""
        return len(self.prompt) + self.limit - 1

    def put(self, token: int, ends: Sequence[int], chance: float | None) -> None:
        """One more token; the job is done if it ends the text, completes a stop string or is the last that fits."""
        if chance is not None:
            self.chances.append(chance)
        ended = token in ends
        if not ended:
            self.ids.append(token)
            ended = self.watcher is not None and self.watcher.add(token)
        if ended or len(self.ids) == self.limit:
            if self.watcher is not None:
                self.watcher.finish()
            self.output = scored(self.ids, ended, self.chances, self.config)  # last: who sees it sees the whole text


class Group(NamedTuple):
    """Rows of the batch that are chosen for by the same rules."""

    rows: Tensor  # (N,) their places
    sampler: Sampler
    processors: list[Processor]


class Engine:
    """Many requests on one network, each with its own options; what it holds is bounded by its config."""

    def __init__(
        self, network: Writer, *, end: EosIds, tokenizer: Tokenizer | None = None, config: EngineConfig | None = None
    ):
        self.network, self.tokenizer, self.config = network, tokenizer, config or EngineConfig()
        self.ends = (end,) if isinstance(end, int) else tuple(end)
        self.queue: deque[Job] = deque()
        self.jobs: list[Job] = []  # one for each row of the batch
        self._step: Step | None = None  # what the rows have read, while there are any
        self._written: TokenBuffer | None = None
        self._seeds = torch.zeros(0, dtype=torch.long)  # (B,)
        self._groups: list[Group] = []
        Step(network, 0, 1)  # a network in training is refused now, not at the first request

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.jobs or self.queue)

    def submit(
        self,
        prompt: Ids,
        config: GenerationConfig,
        *,
        seed: int = 0,
        source: Ids | None = None,
        stop: Sequence[str] = (),
    ) -> Job:
        """Queue a request; for a translator, `source` is what it translates and the prompt opens with its begin token.

        Raises QueueFull where too many wait, and UserError for what could never be done.
        """
        if config.beam > 1 or config.samples > 1 or config.align:
            raise UserError("a request is one text that is written straight on; use beam=1, samples=1 and align=false")
        if stop and self.tokenizer is None:
            raise ValueError("stop strings need an engine with a tokenizer")
        check_seeds([seed])
        check(self.network, [prompt], None if source is None else [source], config, self.ends)
        [limit] = limits([prompt], config.max_new_tokens, self.network.config.max_positions)
        job = Job(prompt, source, config, seed, limit)
        if not self._fits([job]):
            raise UserError(
                f"the request may take {job.slots + len(source or ())} tokens, but the engine holds "
                f"{self.config.cache_tokens}; shorten it, or ask for less with max_new_tokens"
            )
        if len(self.queue) >= self.config.max_queue:
            raise QueueFull(f"{len(self.queue)} requests are waiting already")
        if self.tokenizer is not None:
            job.watcher = StopStrings(stop, self.tokenizer).watcher()
        self.queue.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """Nothing more comes of a job; its row is free at once. One that is done stays as it is."""
        if job.done:
            return
        job.cancelled = True
        if job in self.jobs:
            self._leave([self.jobs.index(job)])
        else:
            self.queue.remove(job)

    @torch.inference_mode()
    def step(self) -> list[Job]:
        """Let waiting requests in, as many as fit, and write one more token in every row; the jobs that got one."""
        scores = [] if self._step is None else [self._step.next(self._last_tokens())[:, 0]]
        if joining := self._admitted():
            scores.append(self._join(joining))
        if not scores:
            return []
        self._write(torch.cat(scores))
        advanced = list(self.jobs)
        self._leave([place for place, job in enumerate(self.jobs) if job.done])
        return advanced

    def _fits(self, jobs: Sequence[Job]) -> bool:
        """Whether the cache may hold these at once, each as long as it may get: every row has room for the longest."""
        sources = max(len(job.source or ()) for job in jobs)
        return len(jobs) * (max(job.slots for job in jobs) + sources) <= self.config.cache_tokens

    def _admitted(self) -> list[Job]:
        """Those that join now, first come, first served: nobody overtakes, so that nobody waits for ever."""
        joining: list[Job] = []
        max_length = 0
        while self.queue and len(self.jobs) + len(joining) < self.config.max_batch_size:
            job = self.queue[0]
            max_length = max(max_length, len(job.prompt), len(job.source or ()))
            if joining and (len(joining) + 1) * max_length > self.config.prefill_tokens:
                break
            if not self._fits([*self.jobs, *joining, job]):
                break
            joining.append(self.queue.popleft())
        return joining

    def _join(self, joining: list[Job]) -> Tensor:
        """Read the prompts of those that join, all at once; the scores (B', V) of what follows them."""
        prompts = [job.prompt for job in joining]
        sources = None if joining[0].source is None else [job.source or () for job in joining]
        capacity = max(job.slots for job in [*self.jobs, *joining])
        step = Step(self.network, len(joining), capacity)
        scores = step.start(prompts, sources)
        written = TokenBuffer(prompts, [job.limit for job in joining], scores.shape[-1], step.device)
        if self._step is None or self._written is None:
            self._step, self._written = step, written
        else:
            self._step.join(step, capacity)
            self._written.join(written)
        self.jobs += joining
        self._arrange()
        return scores

    def _last_tokens(self) -> Tensor:
        """(B, 1): what was written last, which is not read yet."""
        assert self._step is not None
        return torch.tensor([[job.ids[-1]] for job in self.jobs]).to(self._step.device)

    def _write(self, scores: Tensor) -> None:
        """Choose the next token of each row from the scores (B, V), and hand it to its job."""
        assert self._written is not None
        chosen = self._choose(scores, self._written)
        self._written.append(chosen)
        chances: list[float | None] = [None] * len(self.jobs)
        if any(job.config.logprobs for job in self.jobs):
            found = scores.log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0].float().tolist()
            chances = [x if job.config.logprobs else None for x, job in zip(found, self.jobs, strict=True)]
        for job, token, chance in zip(self.jobs, chosen.tolist(), chances, strict=True):
            job.put(token, self.ends, chance)

    def _arrange(self) -> None:
        """Other rows are in the batch: put those with the same rules together, which are chosen for at once."""
        assert self._step is not None
        device, together = self._step.device, dict[GenerationConfig, list[int]]()
        for place, job in enumerate(self.jobs):
            together.setdefault(job.rules, []).append(place)
        ends = torch.tensor(self.ends, dtype=torch.long).to(device)
        self._seeds = torch.tensor([job.seed for job in self.jobs]).to(device)
        self._groups = [
            Group(torch.tensor(places).to(device), Sampler.of(rules), processors(rules, ends))
            for rules, places in together.items()
        ]

    def _choose(self, scores: Tensor, written: TokenBuffer) -> Tensor:
        """The next token (B,) of each row."""
        chosen = torch.empty_like(self._seeds)
        for rows, sampler, rules in self._groups:
            part, own = copy.copy(written), scores
            if len(self._groups) > 1:
                part.select(rows)
                own = scores[rows]
            elif rules:
                own = scores.clone()
            for rule in rules:
                own = rule(own, part)
            chosen[rows] = sampler(own, self._seeds[rows], part.new)
        return chosen

    @torch.inference_mode()
    def _leave(self, places: list[int]) -> None:
        """Free the rows at these places; the last rows take them over."""
        if len(places) == len(self.jobs):
            self.jobs, self._step, self._written, self._groups = [], None, None, []
        if not places or self._step is None or self._written is None:
            return
        order = list(range(len(self.jobs)))
        for place in sorted(places, reverse=True):
            self._step.drop(place)
            order[place] = order[-1]
            order.pop()
        self.jobs = [self.jobs[place] for place in order]
        self._written.select(torch.tensor(order).to(self._step.device))
        sizes = [len(job.prompt) + len(job.ids) for job in self.jobs]
        self._written.max_length = max(sizes)
        self._step.rewind([size - 1 for size in sizes])  # the last token is not read yet
        self._arrange()


def in_order(engine: Engine, jobs: Iterable[Job | None]) -> Iterator[Job]:
    """The jobs as they were submitted, each when it is done; asking for the next one is what submits it.

    Only so many are under way that the rows are kept busy, so that a stream of any length takes little memory. None
    says that no job is waiting now: the others go on. An error in the stream comes after all that was submitted before.
    """
    most = min(4 * engine.config.max_batch_size, engine.config.max_queue)
    coming, under_way = iter(jobs), deque[Job]()
    more, wrong = True, None
    try:
        while more or under_way:
            try:
                while more and len(under_way) < most and (job := next(coming)) is not None:
                    under_way.append(job)
            except StopIteration:
                more = False
            except Exception as error:
                more, wrong = False, error
            if under_way:
                engine.step()
            while under_way and under_way[0].done:
                yield under_way.popleft()
        if wrong is not None:
            raise wrong
    finally:  # nobody asks any more
        for job in under_way:
            engine.cancel(job)
