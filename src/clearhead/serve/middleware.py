"""Pure ASGI middleware: access log, Host and Origin checks, API keys, body limit, cancellation of closed connections.

Starlette's BaseHTTPMiddleware would hide from a route that its client has gone; none is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clearhead.config.serve import ServeConfig
from clearhead.serve.cleanup import cleanup
from clearhead.serve.errors import ApiError
from clearhead.serve.keys import Keys, key_of

log = logging.getLogger("clearhead.serve")
OPEN_ROUTES = {"/health"}  # the only ones that need no key
BODY_KEY_ROUTES = {"/translate", "/languages", "/detect"}  # LibreTranslate's clients send `api_key` in the body
LOCAL_NAMES = {"localhost", "127.0.0.1", "::1", "testserver"}
MAX_LOGGED = 4096  # bytes of a body
LOGGED_KEY = re.compile(r'("api_key"\s*:\s*"|\bapi_key=)[^"&]*')
Observer = Callable[[Scope, int, float], None]  # scope, status, seconds


class AccessLog:
    """One line a request: method, path, status, time, key name; its texts only if asked. An observer for metrics."""

    def __init__(self, app: ASGIApp, observe: Observer | None = None, log_texts: bool = False):
        self.app, self.observe, self.log_texts = app, observe, log_texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and log its end."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 499  # as nginx: the client left before there was an answer
        method, sent, answered = scope["method"], bytearray(), bytearray()
        if method == "HEAD":  # as GET; uvicorn, which keeps the first scope, leaves the body out
            scope = {**scope, "method": "GET"}

        async def watch_receive() -> Message:
            message = await receive()
            _keep(sent, message)
            return message

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            if self.log_texts:
                _keep(answered, message)
            await send(message)

        scope.setdefault("state", {})
        try:
            await self.app(scope, watch_receive if self.log_texts else receive, watch)
        except Exception:
            status = 500
            raise
        finally:
            seconds = time.perf_counter() - started
            if self.observe is not None:
                self.observe(scope, status, seconds)
            path = scope["path"].encode("unicode_escape").decode("ascii")[:200]
            caller = scope["state"].get("key", "-")
            log.info("%s %s %d %.0f ms %s", method, path, status, seconds * 1e3, caller)
            if self.log_texts:
                log.info("request %s answer %s", _loggable(sent), _loggable(answered))


def _keep(texts: bytearray, message: Message) -> None:
    texts += message.get("body", b"")[: MAX_LOGGED - len(texts)]


def _loggable(texts: bytearray) -> str:
    """The beginning of a body on one line, without API keys."""
    text = texts.decode(errors="replace")
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return LOGGED_KEY.sub(r"\1...", shown) or "-"


class Guard:
    """Refuse requests by Host (DNS rebinding), Origin (pages of other sites) and API key, or by the server's state."""

    def __init__(self, app: ASGIApp, config: ServeConfig, keys: Keys, unavailable: Callable[[], str | None]):
        self.app, self.config, self.keys, self.unavailable = app, config, keys, unavailable
        self.names = LOCAL_NAMES | {name.lower() for name in (*config.host_names, config.host.strip("[]"))}
        self.any_host = not config.is_loopback and not config.host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the head of a request; the body is read only where it may hold the key."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http":
            try:
                self._check_origin(Headers(scope=scope))
                receive = await self._check_key(scope, receive)
                reason = None if scope["path"] in OPEN_ROUTES else self.unavailable()
                if reason is not None:
                    raise ApiError(503, reason, headers={"Retry-After": "5", "Connection": "close"})
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_origin(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            raise ApiError(400, "two Host headers; send one", code="wrong_host")
        host = _host_name(hosts[0] if hosts else "")
        if not self.any_host and host not in self.names:
            raise ApiError(421, "the Host header names another server; allow it with --host-name", code="wrong_host")
        origin = headers.get("origin")
        if origin is None or origin in self.config.cors_origins:
            return
        if _authority(origin) != headers.get("host", "").lower():
            raise ApiError(403, "pages of other origins may not call; allow one with --cors", code="wrong_origin")

    async def _check_key(self, scope: Scope, receive: Receive) -> Receive:
        """Check the key; return what the application receives."""
        if not self.keys or scope["path"] in OPEN_ROUTES:
            return receive
        headers = Headers(scope=scope)
        key = key_of(headers.get("authorization", ""))
        if key is None and scope["path"] in BODY_KEY_ROUTES:
            body = await read_body(headers, receive, self.config)
            key = _body_key(headers.get("content-type", ""), body, scope["query_string"])
            receive = _replay(body, receive)
        name = None if key is None else self.keys.find(key)
        if name is None:
            browser = "text/html" in headers.get("accept", "")  # asks its user for a password, which is the key
            challenge = 'Basic realm="clearhead", charset="UTF-8"' if browser else "Bearer"
            raise ApiError(
                401,
                "missing or wrong API key; send `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": challenge},
            )
        scope.setdefault("state", {})["key"] = name
        return receive


class Bounds:
    """Bound body, time to send it, time to take the answer and the whole request; a closed connection cancels it."""

    def __init__(self, app: ASGIApp, config: ServeConfig):
        self.app, self.config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body, then run the request until it ends or its client leaves."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False
        limits = self.config.limits

        async def bounded_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            try:
                async with asyncio.timeout(limits.send_seconds):
                    await send(message)
            except TimeoutError:
                raise ClientGone from None

        try:
            body = await read_body(Headers(scope=scope), receive, self.config)
            async with asyncio.timeout(limits.deadline_seconds):
                with cleanup():
                    await self._run(scope, body, receive, bounded_send)
        except ClientGone:
            return
        except TimeoutError:
            if started:  # a stream that ends without its last event is seen as broken
                return
            error = ApiError(504, f"not done within {limits.deadline_seconds:g} s; ask for less", code="deadline")
            await error.response()(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        gone, delivered = asyncio.Event(), False

        async def app_receive() -> Message:
            nonlocal delivered
            if not delivered:
                delivered = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()
            if not request.done():
                request.cancel()

        request = asyncio.ensure_future(self.app(scope, app_receive, send))
        watcher = asyncio.ensure_future(watch())
        try:
            await request
        except asyncio.CancelledError:
            if not gone.is_set():
                request.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await request
                raise
        finally:
            watcher.cancel()


class ClientGone(Exception):
    """The connection was closed, or nobody reads the answer."""


async def read_body(headers: Headers, receive: Receive, config: ServeConfig) -> bytes:
    """The whole body; too large: 413, too slow: 408."""
    limit = config.limits.max_body_bytes
    too_large = ApiError(413, f"the body is larger than {limit:,} bytes; send less", code="body_too_large")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(config.limits.body_seconds):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
    return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Receive a body that was read already, then what comes after it."""
    done = False

    async def again() -> Message:
        nonlocal done
        if done:
            return await receive()
        done = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _body_key(content_type: str, body: bytes, query: bytes) -> str | None:
    """`api_key` of a form, a JSON object or a query."""
    found: object = None
    try:
        if content_type.startswith("application/json"):
            fields = json.loads(body)
            found = fields.get("api_key") if isinstance(fields, dict) else None
        else:
            found = parse_qs(body.decode(), max_num_fields=100).get("api_key", [None])[0]
        found = found or parse_qs(query.decode(), max_num_fields=100).get("api_key", [None])[0]
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _authority(origin: str) -> str | None:
    """Host and port of an Origin header; None for "null" and what is no URL."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _host_name(host: str) -> str:
    """The name of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
