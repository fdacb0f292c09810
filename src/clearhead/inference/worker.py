"""An engine on a thread of its own: any thread may submit, read along and cancel, and none waits for a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Self

from clearhead.inference.engine import Engine, Job
from clearhead.inference.output import GenerationOutput


class Worker:
    """Drives an engine while there is something to do, and sleeps otherwise; `with Worker(engine) as worker:`.

    Its thread alone steps the engine and frees rows; others add to the queue, read jobs, and say what is unwanted.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._news = threading.Condition()  # told of every request, and after every step
        self._unwanted: list[Job] = []
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._drive, name="clearhead-engine", daemon=True)
        self._thread.start()

    def submit(self, *args: Any, **options: Any) -> Job:
        """As the engine's `submit`."""
        with self._news:
            self._check()
            job = self.engine.submit(*args, **options)
            self._news.notify_all()
            return job

    def cancel(self, job: Job) -> None:
        """As the engine's `cancel`, when the step under way is done."""
        with self._news:
            self._unwanted.append(job)
            self._news.notify_all()

    def pieces(self, job: Job) -> Iterator[str]:
        """The text of a job as it is written; who stops listening cancels it."""
        try:
            done = False
            while not done:
                with self._news:
                    done = job.done  # before the text is asked for: behind a job that is done comes nothing more
                    while not (piece := job.take()) and not done:
                        self._wait()
                        done = job.done
                if piece:
                    yield piece
        finally:
            self.cancel(job)

    def result(self, job: Job) -> GenerationOutput | None:
        """The output of a job once it is done; None if it was cancelled."""
        with self._news:
            while not job.done:
                self._wait()
        return job.output

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        self._news.wait()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError("the engine has failed; make a new one") from self._error
        if self._closed:
            raise RuntimeError("the engine was closed")

    def _drive(self) -> None:
        try:
            while not self._closed:
                for job in self._next():
                    self.engine.cancel(job)
                self.engine.step()
                with self._news:
                    self._news.notify_all()
        except BaseException as error:  # those who wait have to learn of it, whatever it was
            self._error = error
        with self._news:
            self._closed = True
            for job in [*self.engine.queue, *self.engine.jobs]:
                self.engine.cancel(job)
            self._news.notify_all()

    def _next(self) -> list[Job]:
        """Sleep until there is something to do; the jobs that nobody wants any more."""
        with self._news:
            while not (self._closed or self._unwanted or self.engine.busy):
                self._news.wait()
            unwanted, self._unwanted = self._unwanted, []
        return unwanted
