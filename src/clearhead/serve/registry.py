"""The served models: each with its own thread for calls and, if it generates, an engine on another."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from clearhead.config import GenerationConfig
from clearhead.config.model import supported_commands
from clearhead.config.serve import ServeConfig
from clearhead.errors import UserError
from clearhead.inference import EngineRequest, EngineThread, QueueFull
from clearhead.inference.engine import EngineStats, is_out_of_memory
from clearhead.inference.request import Constraint
from clearhead.model import Decoder, EncoderDecoder
from clearhead.predict.batch_generate import engine_for
from clearhead.predict.chat import PromptFormat, prompt_format_of
from clearhead.predict.model import Model
from clearhead.serve.batching import Batcher
from clearhead.serve.cleanup import at_end
from clearhead.serve.errors import ApiError, Overloaded
from clearhead.serve.json_schema import Grammars
from clearhead.serve.metrics import Metrics
from clearhead.serve.token_text import TokenTexts

A = TypeVar("A")
log = logging.getLogger("clearhead.serve")
FIRST_BACKOFF, LAST_BACKOFF = 1.0, 60.0  # seconds before a failed engine is started again
MAX_QUEUE = 1 << 20  # of the engine; `admission` bounds it more tightly
IDLE_CHECKED = 0.25  # seconds between looks at an engine without requests


@dataclass
class Watch:
    """A sequence in the engine, as seen from the event loop."""

    event: asyncio.Event  # set when it may have got a token
    submitted: float
    started: bool = False


class ServedModel:
    """A model in the server; its methods are called on the event loop."""

    def __init__(self, name: str, model: Model, config: ServeConfig, metrics: Metrics):
        self.name, self.model, self.config, self.metrics = name, model, config, metrics
        self.created = int(time.time())
        self.commands = supported_commands(model.config)
        self.generates = isinstance(model.network, Decoder | EncoderDecoder) and "lm" in model.config.outputs
        self.engine: EngineThread | None = None
        self.preparing = 0  # sequences admitted, but not in the engine yet
        self.calls = 0  # `run` calls that wait or run
        self.last_run = 0.0  # monotonic time when the model last did something
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"clearhead-{name}"[:60])
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix=f"clearhead-text-{name}"[:60])
        self._requests: dict[EngineRequest, Watch] = {}
        self._advanced: deque[EngineRequest] = deque()  # filled by the engine's thread
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def offered(self) -> list[str]:
        """What requests can ask for."""
        return [command for command in self.commands if command != "evaluate"]

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens."""
        return TokenTexts(self.model.tokenizers[-1])

    @cached_property
    def batcher(self) -> Batcher:
        """Calls of several requests in one pass."""
        return Batcher(self.run, self.config)

    @cached_property
    def grammars(self) -> Grammars:
        """Constraints for this vocabulary; the first use takes a while."""
        return Grammars(self.model)

    @cached_property
    def prompt_format(self) -> PromptFormat:
        """How conversations are written."""
        return prompt_format_of(self.model)

    # Life

    def prepare(self) -> None:
        """Start the engine before the event loop runs; too little memory for its KV cache is a UserError."""
        if not self.generates:
            return
        try:
            self.engine = self._new_engine()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"{self.name}: not enough memory for its KV cache; lower engine.cache_tokens or "
                "engine.max_batch_size in --config"
            ) from None

    async def start(self) -> None:
        """Start the engine, and watch over it."""
        self._loop = asyncio.get_running_loop()
        if self.generates:
            if self.engine is None:
                await self._start_engine()
            self._supervisor = asyncio.create_task(self._supervise())

    async def _start_engine(self) -> None:
        self.engine = await self.run_text(self._new_engine)

    def _new_engine(self) -> EngineThread:
        limits = self.config.engine.model_dump(exclude_unset=True) | {"max_queue": MAX_QUEUE}
        return EngineThread(engine_for(self.model, **limits), on_step=self._on_step)

    async def _supervise(self) -> None:
        """Start an engine that failed again, later each time; other models are not concerned."""
        backoff, started = FIRST_BACKOFF / 2, time.monotonic()
        while True:
            await asyncio.sleep(IDLE_CHECKED)
            if self.engine is None or self.engine.error is None:
                continue
            log.error("%s: the engine failed", self.name, exc_info=self.engine.error)
            self.engine = None
            self.metrics.restarts.labels(self.name).inc()
            self._wake_all()
            backoff = FIRST_BACKOFF if time.monotonic() - started > LAST_BACKOFF else min(2 * backoff, LAST_BACKOFF)
            while self.engine is None:
                log.info("%s: the engine starts again in %g s", self.name, backoff)
                await asyncio.sleep(backoff)
                started = time.monotonic()
                try:
                    await self._start_engine()
                except Exception:
                    log.exception("%s: the engine cannot be started", self.name)
                    backoff = min(2 * backoff, LAST_BACKOFF)

    async def close(self) -> None:
        """Stop the threads; what still runs is cancelled."""
        if self._supervisor is not None:
            self._supervisor.cancel()
        if self.engine is not None:
            await asyncio.to_thread(self.engine.close)
        for thread in (self._thread, self._text_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    # Calls

    async def run(self, function: Callable[..., A], *args: Any, **options: Any) -> A:
        """Call a function on the model's thread; too many calls waiting: Overloaded."""
        if self.calls > self.config.max_waiting:
            raise Overloaded
        self.calls += 1
        try:
            result = await self._call(self._thread, functools.partial(function, *args, **options))
            self.last_run = time.monotonic()
            return result
        finally:
            self.calls -= 1

    async def run_text(self, function: Callable[..., A], *args: Any, **options: Any) -> A:
        """Call a function that does not need the network (tokenizing, templates), on a thread of its own."""
        return await self._call(self._text_thread, functools.partial(function, *args, **options))

    async def _call(self, thread: ThreadPoolExecutor, function: Callable[[], A]) -> A:
        return await asyncio.get_running_loop().run_in_executor(thread, function)

    # Generation

    @property
    def load(self) -> int:
        """Sequences that are being prepared, wait or run."""
        return self.preparing + len(self._requests)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a row of the batch, and calls that wait for the thread."""
        queued = 0 if self.engine is None else len(self.engine.engine.waiting)
        return self.preparing + queued + max(0, self.calls - 1)

    @property
    def stats(self) -> EngineStats:
        """What the engine does now, and has done so far."""
        return EngineStats(0, 0, 0, 0) if self.engine is None else self.engine.engine.stats

    @contextmanager
    def admission(self, count: int = 1) -> Iterator[None]:
        """Reserve places for sequences while they are prepared; a full queue refuses before any work is done."""
        if self.engine is None:
            raise ApiError(503, f"{self.name} is being started again", code="not_ready", headers={"Retry-After": "2"})
        if self.load and self.load + count > self.engine.engine.config.max_batch_size + self.config.max_waiting:
            raise Overloaded
        self.preparing += count
        try:
            yield
        finally:
            self.preparing -= count

    def submit(
        self,
        prompt: Sequence[int],
        config: GenerationConfig,
        *,
        seed: int = 0,
        source: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        event: asyncio.Event | None = None,
    ) -> EngineRequest:
        """Queue a sequence; those that are followed together share an event."""
        if self.engine is None:
            raise ApiError(503, f"{self.name} is being started again", code="not_ready", headers={"Retry-After": "2"})
        try:
            request = self.engine.submit(prompt, config, seed=seed, source=source, stop=stop, constraint=constraint)
        except QueueFull:
            raise Overloaded from None
        except RuntimeError:
            raise self._failed() from None
        self._requests[request] = Watch(event or asyncio.Event(), time.perf_counter())
        at_end(lambda: self.release(request))
        return request

    async def follow(self, *requests: EngineRequest, seconds: float | None = None) -> AsyncIterator[bool]:
        """Yield True whenever requests may have got tokens, at last when all are done; False after quiet `seconds`.

        Leaving early cancels those that are not done.
        """
        event = self._requests[requests[0]].event
        try:
            while not all(request.done for request in requests):
                try:
                    async with asyncio.timeout(seconds):
                        await event.wait()
                except TimeoutError:
                    yield False
                    continue
                event.clear()
                for request in requests:
                    if request.error is not None:
                        raise _refused(request.error)
                    if request.cancelled:
                        raise self._failed()
                yield True
        finally:
            self.release(*requests)

    def release(self, *requests: EngineRequest) -> None:
        """Forget requests; those that are not done are cancelled."""
        for request in requests:
            if self._requests.pop(request, None) is not None:
                self.metrics.prompt_tokens.labels(self.name).inc(len(request.prompt) + len(request.source or ()))
                self.metrics.new_tokens.labels(self.name).inc(len(request.ids))
            if not request.done and self.engine is not None:
                self.engine.cancel(request)

    def probe(self) -> tuple[list[int], list[int] | None]:
        """A prompt, and a source of a translator, to make one token from."""
        begin = [*self.model.special_tokens.begin] or [0]
        return begin, begin if isinstance(self.model.network, EncoderDecoder) else None

    def _failed(self) -> ApiError:
        return ApiError(503, f"{self.name} failed; try again", code="engine_failed", headers={"Retry-After": "2"})

    def _on_step(self, requests: Sequence[EngineRequest]) -> None:
        """Wake those who wait; called on the engine's thread after each step."""
        self._advanced.extend(requests)
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed
                self._loop = None

    def _deliver(self) -> None:
        self._scheduled = False  # first: what is added from now on schedules again
        self.last_run = time.monotonic()
        while self._advanced:
            watch = self._requests.get(self._advanced.popleft())
            if watch is None:
                continue
            watch.event.set()
            if not watch.started:
                watch.started = True
                self.metrics.first_token.labels(self.name).observe(time.perf_counter() - watch.submitted)

    def _wake_all(self) -> None:
        for watch in self._requests.values():
            watch.event.set()


def _refused(error: BaseException) -> ApiError:
    """A sequence that failed by itself, like one whose constraint cannot be met."""
    log.error("a sequence failed", exc_info=error)
    return ApiError(500, "this sequence failed; the server's log says why")


class Registry:
    """The served models by name."""

    def __init__(self, models: Mapping[str, Model], config: ServeConfig):
        self.config = config
        self.metrics = Metrics()
        self.models = {name: ServedModel(name, model, config, self.metrics) for name, model in models.items()}
        self.metrics.watch(self.models.values())
        self.draining = False

    def get(self, name: str | None, *commands: str) -> ServedModel:
        """The model of this name; without a name, the only one that can do one of the commands."""
        able = [each for each in self.models.values() if not commands or {*commands} & {*each.commands}]
        what = " or ".join(commands)
        if name is None:
            if len(able) == 1:
                return able[0]
            if not able:
                raise ApiError(404, f"no served model can {what}", param="model", code="model_not_found")
            raise ApiError(400, f"model: several can {what}; choose one of /v1/models", param="model")
        found = self.models.get(name)
        if found is None:
            message = "model: no such model is served; /v1/models lists those that are"
            raise ApiError(404, message, param="model", code="model_not_found")
        if found not in able:
            raise ApiError(400, f"model: it cannot {what}; it can {', '.join(found.offered)}", param="model")
        return found

    def prepare(self) -> None:
        """Start the engines before the event loop runs."""
        for served in self.models.values():
            served.prepare()

    async def start(self) -> None:
        """Start all models."""
        for served in self.models.values():
            await served.start()

    async def close(self) -> None:
        """Stop all models."""
        await asyncio.gather(*(served.close() for served in self.models.values()))
