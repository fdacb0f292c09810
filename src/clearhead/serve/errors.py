"""Errors of the API in OpenAI's form: {"error": {"message", "type", "param", "code"}}; nothing internal is in them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from clearhead.errors import UserError

log = logging.getLogger("clearhead.serve")
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "overloaded_error",
    503: "unavailable_error",
    504: "timeout_error",
}
TYPE_NAME = re.compile(r"\[|^constrained-|^(str|int|float|bool|none|dict|list)$|^[A-Z]")  # in pydantic's locations
NO_OBJECT = "the body is not valid JSON; send an object with Content-Type: application/json"
INTERNAL = "the server failed on this request; its log says why"


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        return error_body(self.status, self.message, self.param, self.code)

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body, self.status, headers=self.headers)


class Overloaded(ApiError):
    """Too many requests wait already."""

    def __init__(self, retry_seconds: int = 1):
        message = f"too many requests are waiting; try again in {retry_seconds} s"
        super().__init__(429, message, code="queue_full", headers={"Retry-After": str(retry_seconds)})


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install(app: FastAPI) -> None:
    """Answer every exception in this form."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal)


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    return cast(ApiError, error).response()


async def _user_error(request: Request, error: Exception) -> JSONResponse:
    place = re.match(r"([a-z_]+)(\.\w+)*: ", str(error))
    return JSONResponse(error_body(400, str(error), place[0][:-2] if place else None), 400)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    message, param = describe(cast(RequestValidationError, error).errors())
    return JSONResponse(error_body(400, message, param), 400)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    found = cast(HTTPException, error)
    messages = {400: NO_OBJECT, 404: "no such route; see /docs", 405: "this route has other methods; see /docs"}
    message = messages.get(found.status_code, str(found.detail))
    return JSONResponse(error_body(found.status_code, message), found.status_code, headers=found.headers)


async def _internal(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(500, INTERNAL), 500)


def describe(problems: Sequence[Any]) -> tuple[str, str | None]:
    """The first problem of a body that does not match its schema, and the key concerned."""
    if problems[0]["type"] == "json_invalid":
        place = problems[0]["loc"][-1]
        return (f"invalid JSON at character {place}; check it" if isinstance(place, int) else NO_OBJECT), None
    problems = sorted(problems, key=lambda each: each["type"] != "extra_forbidden")  # often the name of a missing key
    same = [each for each in problems if _place(each)[:1] == _place(problems[0])[:1]]
    # Of a text or a list of texts, the form that was meant is the one whose type is not wrong.
    problem = next((each for each in same if not each["type"].endswith("_type")), problems[0])
    key = ".".join(_place(problem))[:100] or None
    if problem["type"] == "extra_forbidden" or problem.get("ctx", {}).get("max_length") == 0:
        return f"{key}: not supported; leave it out", key
    if key is None and (problem["type"].endswith("_type") or problem["type"] == "missing"):
        return NO_OBJECT, None
    if problem["type"] == "missing":
        return f"{key}: missing; add it", key
    text = problem["msg"].removeprefix("Value error, ").replace(" after validation", "")
    text = text.replace("valid string, unable to parse raw data as a unicode string", "valid Unicode text")
    text = text[:1].lower() + text[1:]
    return f"{key}: {text}" if key else text, key


def _place(problem: Any) -> list[str]:
    """The keys that lead to a problem, without the names of pydantic's types."""
    place = [str(part) for part in problem["loc"] if part not in ("body", "query", "path")]
    return [part for part in place if not TYPE_NAME.search(part)]
