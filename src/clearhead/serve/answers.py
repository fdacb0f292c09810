"""How generated texts are written: as one JSON object, or as server-sent events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import JSONResponse, Response

from clearhead.serve.generation import DONE, KEEP_ALIVE, EventStream, Generation, Piece, event, usage
from clearhead.serve.registry import ServedModel
from clearhead.serve.sampling_options import SamplingOptions


class TextAnswer:
    """An answer of `/v1/completions` or `/v1/chat/completions`; subclasses say how a choice is written."""

    prefix, kind, chunk_kind = "", "", ""  # of the id; `object` of an answer and of an event

    def __init__(self, served: ServedModel, body: SamplingOptions, seed: int):
        self.served, self.body, self.seed = served, body, seed
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole text."""
        raise NotImplementedError

    def delta(self, piece: Piece) -> dict[str, Any]:
        """A piece of a text."""
        return self.choice(piece)

    def first_deltas(self, count: int) -> list[dict[str, Any]]:
        """What comes before the texts."""
        return []

    async def respond(self, generation: Generation) -> Response:
        """Answer when the texts are done, or stream them."""
        prompts = [each.prompt for each in generation.sequences][:: self.body.n or 1]
        if self.body.stream:
            return EventStream(self._events(generation, prompts))
        choices = [self.choice(piece) for piece in await generation.finish()]
        return JSONResponse(self._frame(self.kind, choices) | {"usage": usage(prompts, generation.new_tokens)})

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "choices": choices,
            "seed": self.seed,
        }

    async def _events(self, generation: Generation, prompts: Sequence[Sequence[int]]) -> AsyncIterator[bytes]:
        wants_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        more = {"usage": None} if wants_usage else {}

        def chunk(delta: dict[str, Any]) -> bytes:
            return event(self._frame(self.chunk_kind, [delta]) | more)

        for delta in self.first_deltas(len(generation.requests)):
            yield chunk(delta)
        async for piece in generation.pieces(self.served.config.keep_alive_seconds):
            yield KEEP_ALIVE if piece is None else chunk(self.delta(piece))
        if wants_usage:
            yield event(self._frame(self.chunk_kind, []) | {"usage": usage(prompts, generation.new_tokens)})
        yield DONE
