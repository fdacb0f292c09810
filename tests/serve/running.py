"""A server on a free port of this machine, in a thread of this process."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from clearhead.config.serve import ServeConfig
from clearhead.predict import Model
from clearhead.serve.app import create_app
from clearhead.serve.keys import Keys
from clearhead.serve.server import Server, bind


@dataclass
class Running:
    """A server that listens."""

    app: FastAPI
    server: Server
    url: str
    listener: socket.socket

    @property
    def registry(self) -> Any:
        return self.app.state.registry

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)


@contextlib.contextmanager
def serving(
    models: Mapping[str, Model], keys: Keys | None = None, loop: str = "auto", **settings: Any
) -> Iterator[Running]:
    """Serve models until the block ends."""
    config = ServeConfig(port=0, **settings)
    listener = bind(config)
    server = Server(create_app(models, config, keys), config)
    server.config.loop = loop
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield Running(server.app, server, f"http://127.0.0.1:{listener.getsockname()[1]}", listener)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
