"""Run the application: sockets, signals, draining."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from clearhead.config.serve import ServeConfig
from clearhead.errors import UserError
from clearhead.serve.errors import error_body

MAX_HEAD_BYTES = 1 << 16  # of a request
MIN_TAKEN = 1 << 14  # bytes of an answer within `send_seconds`
log = logging.getLogger("clearhead.serve")


def check_address(config: ServeConfig, has_keys: bool) -> None:
    """Refuse to listen beyond this machine without API keys."""
    if not (config.is_loopback or has_keys or config.insecure):
        raise UserError(
            f"--host {config.host}: other machines could call without a key; add --api-keys FILE, or --insecure if "
            "the network is trusted"
        )


def bind(config: ServeConfig) -> socket.socket:
    """Listen on the address of the config."""
    try:
        family = socket.getaddrinfo(config.host.strip("[]"), config.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle on
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host.strip("[]"), config.port))
        listener.listen(min(config.max_connections, 1024))
    except OSError as error:
        raise UserError(
            f"--port {config.port}: cannot listen on {config.host} ({error.strerror}); choose another port or host"
        ) from None
    return listener


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol, which waits a bounded time for the head of a request and for an answer to be taken.

    uvicorn closes a connection when everything is sent, which would be never if its client does not read.
    """

    body_seconds, send_seconds = 10.0, 30.0
    _unsent = 0  # bytes of an answer that is complete, at the last look
    _unsent_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait_for_head()
        self._unsent_timer = self.loop.call_later(self.send_seconds, self._look_at_unsent)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        for timer in (self._head_timer, self._unsent_timer):
            if timer is not None:
                timer.cancel()

    def _look_at_unsent(self) -> None:
        """Drop a connection that took less than MIN_TAKEN of a complete answer since the last look."""
        unsent = self.transport.get_write_buffer_size() if self._is_idle() or self.transport.is_closing() else 0
        if unsent and self._unsent and unsent > self._unsent - MIN_TAKEN:
            self.transport.abort()
            return
        self._unsent = unsent
        self._unsent_timer = self.loop.call_later(self.send_seconds, self._look_at_unsent)

    def data_received(self, data: bytes) -> None:
        """Count what comes before the head of a request is complete."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before or not self._is_idle():
            self._head_bytes = 0
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
            return
        self._head_bytes += len(data)
        self._wait_for_head()
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, in the form of all errors."""
        body = json.dumps(error_body(400, "this is not a valid HTTP request")).encode()
        head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "
        self.transport.write(head + b"%d\r\n\r\n" % len(body) + body)
        self.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.body_seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._is_idle() and not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server, which finishes running requests before it stops listening."""

    def __init__(self, app: FastAPI, config: ServeConfig):
        self.app, self.grace_seconds = app, config.grace_seconds
        self.drain_until: float | None = None
        bounds = {"body_seconds": config.limits.body_seconds, "send_seconds": config.limits.send_seconds}
        protocol = type("Protocol", (BoundedProtocol,), bounds)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="on",
                ws="none",
                timeout_keep_alive=30,
                timeout_graceful_shutdown=1,
            )
        )

        app.state.is_full = lambda: len(self.server_state.connections) > config.max_connections

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, stop at the second."""
        if self.drain_until is not None:
            self.should_exit = self.force_exit = True
            return
        self.app.state.registry.draining = True
        self.drain_until = time.monotonic() + self.grace_seconds

    async def on_tick(self, counter: int) -> bool:
        """Stop when all requests are done, or the grace time is over."""
        if self.drain_until is not None and (not self.server_state.tasks or time.monotonic() > self.drain_until):
            return True
        return await super().on_tick(counter)


def run(app: FastAPI, listener: socket.socket, config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads the API keys again."""
    app.state.registry.prepare()
    server = Server(app, config)

    def reload_keys() -> None:
        try:
            app.state.keys.reload()
            log.info("API keys read again")
        except UserError as error:
            log.error("the old API keys stay: %s", error)

    async def serve() -> None:
        if hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_keys)
        await server.serve([listener])

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop where it is installed
        runner.run(serve())
