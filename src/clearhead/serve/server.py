"""Run the application: sockets, signals, draining."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from clearhead.config.serve import ServeConfig
from clearhead.errors import UserError

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
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host.strip("[]"), config.port))
        listener.listen(min(config.max_connections, 1024))
    except OSError as error:
        raise UserError(
            f"--port {config.port}: cannot listen on {config.host} ({error.strerror}); choose another port or host"
        ) from None
    return listener


class Server(uvicorn.Server):
    """uvicorn's server, which finishes running requests before it stops listening."""

    def __init__(self, app: FastAPI, config: ServeConfig):
        self.app, self.grace_seconds = app, config.grace_seconds
        self.drain_until: float | None = None
        super().__init__(
            uvicorn.Config(
                app,
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

    asyncio.run(serve())
