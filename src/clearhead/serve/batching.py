"""Dynamic batching: texts of several requests in one pass of an encoder, each waiting a bounded time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

from clearhead.config.serve import ServeConfig
from clearhead.serve.errors import Overloaded

MAX_BATCH = 64  # texts of one pass: a request waits at most for one such batch and its own
Call = Callable[[list[Any]], Sequence[Any]]


class Job:
    """The texts of one request."""

    def __init__(self, items: Sequence[Any]):
        self.items = items
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        if not self.done.done():
            self.done.set_exception(error)


class Batcher:
    """Collect the texts of requests with the same options for one model; while a pass runs, the next one fills up."""

    def __init__(self, run: Callable[[Call, list[Any]], Awaitable[Sequence[Any]]], config: ServeConfig):
        self._run_call, self.config = run, config
        self.jobs: dict[Hashable, deque[Job]] = {}
        self.tasks: dict[Hashable, asyncio.Task[None]] = {}

    async def run(self, key: Hashable, call: Call, items: Sequence[Any]) -> list[Any]:
        """The results of `call` for items; calls with the same key may be made together."""
        waiting = sum(len(job.items) for jobs in self.jobs.values() for job in jobs)
        if waiting and waiting + len(items) > MAX_BATCH + self.config.max_waiting:
            raise Overloaded
        job = Job(items)
        self.jobs.setdefault(key, deque()).append(job)
        if key not in self.tasks:
            self.tasks[key] = asyncio.create_task(self._work(key, call))
        try:
            return await job.done
        finally:
            if key in self.jobs and job in self.jobs[key]:  # cancelled while it waited
                self.jobs[key].remove(job)

    async def _work(self, key: Hashable, call: Call) -> None:
        jobs = self.jobs[key]
        try:
            await asyncio.sleep(self.config.batch_wait_ms / 1000)
            while jobs:
                batch = [jobs.popleft()]
                while jobs and sum(len(job.items) for job in batch) + len(jobs[0].items) <= MAX_BATCH:
                    batch.append(jobs.popleft())
                await self._run(call, batch)
        finally:
            del self.jobs[key], self.tasks[key]
            for job in jobs:
                job.fail(asyncio.CancelledError())

    async def _run(self, call: Call, batch: list[Job]) -> None:
        """Run jobs together; if that fails, one after another, as the text of one must not fail the others."""
        try:
            items = [item for job in batch for item in job.items]
            if len(batch) == 1:
                results: list[Any] = []
                while len(results) < len(items) and not batch[0].done.done():  # a client that leaves ends it
                    results += await self._run_call(call, items[len(results) :][:MAX_BATCH])
            else:
                results = list(await self._run_call(call, items))
        except Exception as error:
            if len(batch) == 1:
                batch[0].fail(error)
                return
            for job in batch:
                await self._run(call, [job])
            return
        start = 0
        for job in batch:
            if not job.done.done():
                job.done.set_result(results[start : start + len(job.items)])
            start += len(job.items)
