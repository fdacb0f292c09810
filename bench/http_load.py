"""Closed-loop HTTP clients in one process: each sends its next request as soon as its last one is answered.

A client is an `asyncio.Protocol` that looks at no more than it must, so that on two cores the server keeps its own.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LENGTH = re.compile(rb"content-length: *(\d+)", re.I)
USAGE = re.compile(rb'"(?:completion_tokens|tokens_predicted)": ?(\d+)')
FIRST = re.compile(rb'data: .*"(?:text|content)": ?"[^"]')  # a piece of text: not the role that comes before it


@dataclass
class Load:
    """What the clients saw."""

    tokens: int = 0  # named in usage
    done: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token; without streaming, to the answer
    seconds: list[float] = field(default_factory=list)  # of whole requests
    errors: list[str] = field(default_factory=list)
    reconnects: int = 0  # connections that the server closed after an answer

    def quantile(self, values: list[float], share: float) -> float:
        """Return a quantile of some times in milliseconds."""
        if len(values) < 2:
            return 1e3 * sum(values)
        return 1e3 * statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


class Client(asyncio.Protocol):
    """One connection that is kept, or made again where the server closes it after an answer."""

    def __init__(self, next_request: Callable[[], bytes], load: Load, host: str, port: int):
        self.next_request, self.load, self.host, self.port = next_request, load, host, port
        self.buffer = bytearray()
        self.started, self.is_first, self.stopped = 0.0, True, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._send()

    def _send(self) -> None:
        self.buffer.clear()
        self.is_first, self.started = True, time.perf_counter()
        self.transport.write(self.next_request())

    def data_received(self, data: bytes) -> None:
        """Time the first token; at the end of an answer send the next request."""
        self.buffer += data
        if self.is_first and FIRST.search(self.buffer):
            self.load.first.append(time.perf_counter() - self.started)
            self.is_first = False
        if not self._is_complete():
            return
        now = time.perf_counter()
        if not self.buffer.startswith(b"HTTP/1.1 200"):
            self.load.errors.append(bytes(self.buffer[:300]).decode(errors="replace"))
        elif b"data: {" in self.buffer and b'"error"' in self.buffer[-2000:]:
            self.load.errors.append(bytes(self.buffer[-300:]).decode(errors="replace"))
        if self.is_first:
            self.load.first.append(now - self.started)
        self.load.seconds.append(now - self.started)
        self.load.done += 1
        if counts := USAGE.findall(self.buffer):
            self.load.tokens += int(counts[-1])
        if not self.stopped:
            self._send()

    def _is_complete(self) -> bool:
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return False
        if length := LENGTH.search(self.buffer, 0, head):
            return len(self.buffer) >= head + 4 + int(length[1])
        return self.buffer.endswith(b"\r\n0\r\n\r\n", head + 4)

    def connection_lost(self, error: Exception | None) -> None:
        """Connect again; an answer that was cut off is an error."""
        if self.stopped:
            return
        if self.buffer or error:
            self.load.errors.append(f"connection closed ({error})")
            return
        self.load.reconnects += 1
        self.connecting = asyncio.ensure_future(self.connect())

    async def connect(self) -> None:
        """Connect, and send the first request."""
        await asyncio.get_running_loop().create_connection(lambda: self, self.host, self.port)


async def run_clients(
    url: str,
    make_request: Callable[[int], tuple[str, bytes]],
    clients: int,
    seconds: float,
    warmup: float,
    at_edge: Callable[[], float] = lambda: 0.0,
    first_number: int = 0,
) -> tuple[Load, float, float]:
    """Run clients; return what they saw after the warm-up, the seconds it took, and how much `at_edge` grew."""
    where = urlsplit(url)
    numbers, load = itertools.count(first_number), Load()
    assert where.hostname is not None
    assert where.port is not None

    def next_request() -> bytes:
        path, body = make_request(next(numbers))
        head = f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    made = [Client(next_request, load, where.hostname, where.port) for _ in range(clients)]
    await asyncio.gather(*(client.connect() for client in made))
    await asyncio.sleep(warmup)
    measured, before, start = Load(), at_edge(), time.perf_counter()
    for client in made:
        client.load = measured
    await asyncio.sleep(seconds)
    passed, after = time.perf_counter() - start, at_edge()
    for client in made:
        client.stopped = True
        client.load = Load()
        client.transport.abort()
    measured.errors += load.errors
    return measured, passed, after - before
