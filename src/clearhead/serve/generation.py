"""The sequences of one HTTP request in the engine: texts and logprobs as they grow, and server-sent events of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import StreamingResponse

from clearhead.config import GenerationConfig
from clearhead.inference import EngineRequest
from clearhead.inference.request import Constraint
from clearhead.serve.errors import ApiError
from clearhead.serve.registry import ServedModel

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class NewSequence:
    """One sequence to generate."""

    prompt: Sequence[int]
    config: GenerationConfig
    seed: int
    source: Sequence[int] | None = None
    stops: Sequence[str] = ()
    constraint: Constraint | None = None


@dataclass
class Progress:
    """How much of a sequence was taken."""

    index: int
    request: EngineRequest
    tokens: int = 0
    chars: int = 0
    finished: bool = False


@dataclass(frozen=True)
class Piece:
    """What is new of a sequence."""

    index: int
    text: str
    start: int  # of the text
    ids: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]]
    finish_reason: str | None = None


@dataclass
class Generation:
    """Sequences that were submitted together."""

    served: ServedModel
    sequences: Sequence[NewSequence]
    strip: bool = False  # drop the white space before each text
    requests: list[EngineRequest] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)

    def __post_init__(self) -> None:
        event = asyncio.Event()
        for index, each in enumerate(self.sequences):
            request = self.served.submit(
                each.prompt,
                each.config,
                seed=each.seed,
                source=each.source,
                stop=each.stops,
                constraint=each.constraint,
                event=event,
            )
            self.requests.append(request)
            self.progress.append(Progress(index, request))

    @property
    def new_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(request.ids) for request in self.requests)

    async def pieces(self, keep_alive: float) -> AsyncIterator[Piece | None]:
        """Yield what is new as it is generated, and None after `keep_alive` seconds without anything."""
        async for advanced in self.served.follow(*self.requests, seconds=keep_alive):
            if not advanced:
                yield None
            for piece in self._new():
                yield piece
        for piece in self._new():  # nothing, unless all were done before
            yield piece

    async def finish(self) -> list[Piece]:
        """Wait for all sequences; return each as a whole."""
        async for _ in self.served.follow(*self.requests):
            pass
        return list(self._new())

    def _new(self) -> Iterator[Piece]:
        for progress in self.progress:
            if progress.finished:
                continue
            request = progress.request
            output = request.output  # before the text: a sequence that is done gets no more
            text, count = request.text, len(request.ids)
            start = progress.chars
            if self.strip and not start:
                start = len(text) - len(text.lstrip())
            if output is None and len(text) <= start:
                continue
            logprobs, top = request.logprobs[progress.tokens : count], request.top_logprobs[progress.tokens : count]
            ids = request.ids[progress.tokens : count]
            progress.tokens, progress.chars, progress.finished = count, max(start, len(text)), output is not None
            reason = None if output is None else "stop" if output.finished else "length"
            yield Piece(progress.index, text[start:], start, ids, logprobs, top, reason)


class EventStream(StreamingResponse):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would wait for 4 kB
        super().__init__(_with_errors(events), headers=headers)


def event(data: dict[str, Any]) -> bytes:
    """An event with JSON data."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events; an error after the first of them is one more event."""
    try:
        async for each in events:
            yield each
    except ApiError as error:
        yield event(error.body)


def usage(prompts: Iterable[Sequence[int]], new_tokens: int) -> dict[str, int]:
    """Token counts, as OpenAI gives them."""
    read = sum(map(len, prompts))
    return {"prompt_tokens": read, "completion_tokens": new_tokens, "total_tokens": read + new_tokens}
