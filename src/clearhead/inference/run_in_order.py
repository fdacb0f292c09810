"""Run a stream of requests on an engine, and return them in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from clearhead.inference.engine import Engine
from clearhead.inference.request import EngineRequest


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
