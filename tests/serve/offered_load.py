"""HTTP requests at a rate that does not wait for the answers (an open loop), or from a number of clients."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Offered:
    """What became of the requests."""

    seconds: float = 0
    done: list[float] = field(default_factory=list)  # seconds of each that was answered in full
    refused: list[float] = field(default_factory=list)  # seconds until 429
    cut: int = 0  # admitted, but not answered in full
    wrong: list[str] = field(default_factory=list)


def offer(url: str, body: dict[str, Any], seconds: float, clients: int = 0, rate: float = 0) -> Offered:
    """Send requests for some seconds, then wait for all answers."""
    result = Offered()
    asyncio.run(_offer(url, body, seconds, clients, rate, result))
    return result


async def _offer(url: str, body: dict[str, Any], seconds: float, clients: int, rate: float, result: Offered) -> None:
    pool: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    start, draw, number = time.perf_counter(), random.Random(0), 0

    async def client() -> None:
        while time.perf_counter() < start + seconds:
            await _request(url, body, pool, result)

    if clients:
        await asyncio.gather(*(client() for _ in range(clients)))
    else:
        tasks = set()
        due = start
        while due < start + seconds:
            due += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            number += 1
            tasks.add(asyncio.create_task(_request(url, body | {"seed": number}, pool, result)))
        await asyncio.gather(*tasks)
    result.seconds = time.perf_counter() - start
    for _, writer in pool:
        writer.close()


async def _request(
    url: str,
    body: dict[str, Any],
    pool: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    result: Offered,
) -> None:
    where = urlsplit(url)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    begin = time.perf_counter()
    status = 0
    try:
        reader, writer = pool.pop() if pool else await asyncio.open_connection(where.hostname, where.port)
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        top = await reader.readuntil(b"\r\n\r\n")
        status = int(top.split(b" ", 2)[1])
        length = int(top.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        passed = time.perf_counter() - begin
        if status == 429:
            assert b"retry-after" in top.lower()
            assert answer["error"]["code"] == "queue_full"
            result.refused.append(passed)
        elif status == 200 and answer["usage"]["completion_tokens"] == body["max_tokens"]:
            result.done.append(passed)
        else:
            result.wrong.append(f"{status} {answer}"[:300])
        pool.append((reader, writer))
    except (OSError, EOFError, ValueError) as error:
        result.cut += 1
        result.wrong.append(repr(error))
