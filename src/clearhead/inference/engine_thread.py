"""An engine on a background thread: other threads submit, stream and cancel requests without waiting for a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from clearhead.inference.engine import Engine
from clearhead.inference.output import GenerationOutput
from clearhead.inference.request import EngineRequest


class EngineThread:
    """Step an engine while it is busy, sleep otherwise; a context manager that closes the engine.

    Only this thread steps the engine and frees rows; other threads queue, read and cancel requests. `on_step` is called
    here after each step with the requests that got a token, and with all that are left when the thread ends.
    """

    def __init__(self, engine: Engine, on_step: Callable[[Sequence[EngineRequest]], None] | None = None):
        self.engine, self.on_step = engine, on_step
        self._changed = threading.Condition()  # notified of every request and after every step
        self._cancellations: list[EngineRequest] = []
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="clearhead-engine", daemon=True)
        self._thread.start()

    def submit(self, *args: Any, **options: Any) -> EngineRequest:
        """Submit a request; arguments are those of `Engine.submit`."""
        with self._changed:
            self._check()
            request = self.engine.submit(*args, **options)
            self._changed.notify_all()
            return request

    def cancel(self, request: EngineRequest) -> None:
        """Cancel a request after the current step."""
        with self._changed:
            self._cancellations.append(request)
            self._changed.notify_all()

    def stream(self, request: EngineRequest) -> Iterator[str]:
        """Yield the text of a request in pieces; closing the iterator cancels the request."""
        try:
            done = False
            while not done:
                with self._changed:
                    done = request.done  # read before the text: a request that is done gets no more
                    while not (piece := request.take_text()) and not done:
                        self._wait()
                        done = request.done
                if piece:
                    yield piece
            if request.error is not None:
                raise request.error
        finally:
            self.cancel(request)

    def result(self, request: EngineRequest) -> GenerationOutput | None:
        """Wait for the output of a request, and raise its error if it failed; None if it was cancelled."""
        with self._changed:
            while not request.done:
                self._wait()
        if request.error is not None:
            raise request.error
        return request.output

    @property
    def error(self) -> BaseException | None:
        """What ended the thread, if the engine failed."""
        return self._error

    def close(self) -> None:
        """Cancel all requests and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        self._changed.wait()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError("the engine has failed; make a new one") from self._error
        if self._closed:
            raise RuntimeError("the engine was closed")

    def _run(self) -> None:
        try:
            while not self._closed:
                for request in self._wait_for_work():
                    self.engine.cancel(request)
                advanced = self.engine.step()
                with self._changed:
                    self._changed.notify_all()
                if self.on_step is not None:
                    self.on_step(advanced)
        except BaseException as error:  # raised again in the threads that wait
            self._error = error
        with self._changed:
            self._closed = True
            left = [*self.engine.waiting, *self.engine.running]
            for request in left:
                self.engine.cancel(request)
            self._changed.notify_all()
        if self.on_step is not None:
            self.on_step(left)

    def _wait_for_work(self) -> list[EngineRequest]:
        """Sleep until there is something to do; return the requests to cancel."""
        with self._changed:
            while not (self._closed or self._cancellations or self.engine.busy):
                self._changed.wait()
            cancellations, self._cancellations = self._cancellations, []
        return cancellations
