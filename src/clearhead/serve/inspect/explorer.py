"""The models of the page, and the work on them off the event loop; how errors become answers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import Depends
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute

from clearhead.errors import UserError
from clearhead.predict import Model
from clearhead.serve.errors import ApiError, Overloaded, describe
from clearhead.serve.inspect.frame import frame
from clearhead.serve.inspect.texts import ExploredModel

MAX_BODY_BYTES = 1 << 23  # a text of a million characters, twice, in UTF-8
MAX_WAITING = 64  # requests of one model; more are refused
A = TypeVar("A")
Answer = tuple[dict[str, Any], dict[str, Any]]  # header and tensors of a frame


class Explorer:
    """Models by name. A request works on one of them in a thread of its own, one at a time for each model."""

    def __init__(self, models: Mapping[str, Model]):
        self.models = {name: ExploredModel(model, name) for name, model in models.items()}
        self.own_views: list[str] = []  # added by `add_view`

    def get(self, name: str) -> ExploredModel:
        """The model of a name; "" is the first."""
        if not self.models:
            raise UserError("there is no model to explore; name one on the command line")
        if not name:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise UserError(f"model: {name[:80]!r} is not served here; there is {', '.join(self.models)}")
        return self.models[name]

    async def run(self, name: str, work: Callable[[ExploredModel], A]) -> A:
        """Call `work(model)` in a thread, with the model's lock."""
        explored = self.get(name)
        if explored.waiting >= MAX_WAITING:
            raise Overloaded

        def locked() -> A:
            with explored.lock:
                return work(explored)

        explored.waiting += 1
        try:
            return await anyio.to_thread.run_sync(locked)
        finally:
            explored.waiting -= 1

    async def frame(self, name: str, work: Callable[[ExploredModel], Answer]) -> Response:
        """The answer for `work(model)`, which returns a header and tensors."""
        data = await self.run(name, lambda explored: frame(*work(explored)))
        return Response(data, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})


def explorer_of(request: HTTPRequest) -> Explorer:
    """The explorer of the app."""
    explorer: Explorer = request.app.state.explorer
    return explorer


Exploring = Annotated[Explorer, Depends(explorer_of)]


class InspectRoute(APIRoute):
    """A route whose errors are {"error": {"message", "type", "param", "code"}}, on any app."""

    def get_route_handler(self) -> Callable[[HTTPRequest], Coroutine[Any, Any, Response]]:
        """The handler with its errors turned into answers."""
        handler = super().get_route_handler()

        async def answer(request: HTTPRequest) -> Response:
            try:
                await _check_size(request)
                return await handler(request)
            except ApiError as error:
                return error.response()
            except RequestValidationError as error:
                message, param = describe(error.errors())
                return ApiError(400, message, param=param).response()
            except UserError as error:
                message = str(error)
                name = message.split(":", 1)[0]
                return ApiError(400, message, param=name if name in ("text", "target", "model") else None).response()

        return answer


async def _check_size(request: HTTPRequest) -> None:
    """Read the body up to the limit; the handler then finds it read."""
    received, parts = 0, []
    async for part in request.stream():
        received += len(part)
        if received > MAX_BODY_BYTES:
            raise ApiError(413, f"text: more than {MAX_BODY_BYTES:,} bytes; send less", param="text")
        parts.append(part)
    request._body = b"".join(parts)
