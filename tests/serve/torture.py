"""Fault campaigns against the HTTP server (`make torture`); `test_faults.py` runs short versions of them.

    python -m tests.serve.torture --disconnects 2000 --overload 50 --minutes 30

Disconnects in five phases, overload, readers that do not read, connections that say nothing, an engine that fails, and
mixed load with the server's memory. Each campaign prints what it measured and raises if anything leaked; whether times
are within their limits is printed, and decides the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from clearhead.predict import Model, load
from tests.serve.commands import started
from tests.serve.running import Running, serving

PROMPT = "It was a bright cold day in April and "
PHASES = ("queued", "prefill", "first token", "stream", "no stream")
FREE_SECONDS, REFUSE_SECONDS, GOODPUT, GROWTH_MB = 0.25, 0.05, 0.95, 5.0  # the limits
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST instead of FIN


def main() -> None:
    """Run all campaigns."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.torture", description=__doc__.split("\n")[0])
    parser.add_argument("--disconnects", type=int, default=2000)
    parser.add_argument("--overload", type=int, default=50, help="Offered load, relative to what the server can do.")
    parser.add_argument("--overload-seconds", type=float, default=30)
    parser.add_argument("--readers", type=int, default=50)
    parser.add_argument("--crashes", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=30)
    options = parser.parse_args()
    models = {name: load(name, "cpu") for name in ("novels-gpt", "en-de")}
    good = [
        disconnects(models, options.disconnects),
        slow_readers(models, options.readers),
        half_open(models, options.readers),
        crashes(models, options.crashes),
        overload(options.overload, options.overload_seconds),
        mixed(60 * options.minutes, 60 * min(5, options.minutes / 6)),
    ]
    sys.exit(not all(good))


def request(running: Running, path: str, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """Send a request on a new connection."""
    opened = socket.socket()
    if receive_buffer is not None:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    opened.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
    opened.settimeout(30)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    opened.sendall(f"{head}{len(content)}\r\n\r\n".encode() + content)
    return opened


def wait_until(condition: Callable[[], object], seconds: float = 30) -> float:
    """Wait for something; return the seconds that it took."""
    start = time.perf_counter()
    while not condition():
        assert time.perf_counter() - start < seconds, "it did not happen"
        time.sleep(0.0005)
    return time.perf_counter() - start


def check_nothing_leaked(running: Running, seconds: float = 10) -> None:
    """Wait until nothing runs, then compare all counts with those of an idle server."""

    def idle() -> bool:
        return all(served.load == 0 and served.calls == 0 and not served.batcher.tasks for served in models)

    models = list(running.registry.models.values())
    with contextlib.suppress(AssertionError):
        wait_until(idle, seconds)
    for served in models:
        assert (served.load, served.calls, served.batcher.jobs, served.batcher.tasks) == (0, 0, {}, {})
        if served.engine is not None:
            wait_until(lambda engine=served.engine.engine: not engine.busy, seconds)
            stats = served.stats
            assert (stats.queued, stats.running, stats.pages_used) == (0, 0, 0), stats


def quantile(values: list[float], share: float) -> float:
    """A quantile of some values."""
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1] if len(values) > 1 else 0.0


def report(name: str, text: str, good: bool) -> bool:
    """Print the result of a campaign."""
    print(f"{name:<14} {'ok  ' if good else 'OVER THE LIMIT'} {text}", flush=True)
    return good


def disconnects(models: dict[str, Model], count: int) -> bool:
    """Close connections in each phase of a request, beside others that run; time until row and pages are free."""
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    draw = random.Random(0)
    with serving(models, engine={"max_batch_size": 4, "prefill_tokens": 16, "cache_tokens": 8192}) as running:
        served = running.registry.get("novels-gpt")
        engine, stop = served.engine.engine, threading.Event()
        with ThreadPoolExecutor(2) as pool:
            for _ in range(2):
                pool.submit(keep_busy, running, stop)
            try:
                for number in range(count):
                    phase = PHASES[number % len(PHASES)]
                    times[phase].append(disconnect(running, phase, draw))
                    if number % 500 == 499:
                        print(f"  {number + 1:,} of {count:,} disconnects", flush=True)
            finally:
                stop.set()
        assert served.engine.engine is engine, "the engine failed meanwhile"
        check_nothing_leaked(running)
    everything = [value for values in times.values() for value in values]
    shown = ", ".join(f"{phase} {1e3 * quantile(values, 0.99):.0f}" for phase, values in times.items())
    worst = quantile(everything, 0.99)
    text = f"{count:,}: free after {1e3 * statistics.median(everything):.0f} ms (median), {1e3 * worst:.0f} ms (p99); "
    return report("disconnects", f"{text}p99 by phase: {shown}; none leaked", worst <= FREE_SECONDS)


def keep_busy(running: Running, stop: threading.Event) -> None:
    """Requests of both models, until told to stop."""
    with running.client() as client:
        while not stop.is_set():
            client.post("/v1/completions", json={"prompt": "She said", "max_tokens": 20})
            client.post("/translate", json={"q": "Two dogs play.", "source": "en", "target": "de"})


def disconnect(running: Running, phase: str, draw: random.Random) -> float:
    """Start a request, close its connection in a phase; return the seconds until its row and pages are free."""
    served = running.registry.get("novels-gpt")
    blockers = []
    if phase == "queued":
        blockers = [request(running, "/v1/completions", {"prompt": PROMPT, "max_tokens": 400, "n": 6, "seed": 1})]
        wait_until(lambda: served.stats.queued >= 2)
    prompt = PROMPT * (20 if phase == "prefill" else 1) + str(draw.random())
    stream = phase in ("first token", "stream")
    ids = served.model.prompt_ids(prompt)
    body = {"prompt": ids, "max_tokens": 150, "seed": draw.randrange(1 << 40), "stream": stream}
    opened = request(running, "/v1/completions", body)

    def own() -> Any:
        return next((each for each in list(served._requests) if each.prompt == ids), None)

    wait_until(lambda: own() is not None)
    mine = own()
    assert mine is not None, "too fast for this test"
    if phase == "prefill":
        wait_until(lambda: mine in served.engine.engine.running)
    elif phase == "no stream":
        wait_until(lambda: len(mine.ids) >= draw.randint(1, 20))
    elif stream:
        wanted, received = 1 if phase == "first token" else draw.randint(2, 20), b""
        while received.count(b'"text"') < wanted:
            received += opened.recv(4096)
    assert not mine.done, "too fast for this test"
    if draw.random() < 0.5:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
    opened.close()
    engine = served.engine.engine
    seconds = wait_until(lambda: mine.done and mine not in engine.running and mine not in engine.waiting)
    assert mine.cancelled, "it was not cancelled, but finished"
    for blocker in blockers:
        blocker.close()
        wait_until(lambda: served.stats.queued == 0)
    return seconds


def slow_readers(models: dict[str, Model], count: int, rounds: int = 3, tokens: int = 100) -> bool:
    """Clients that ask for large answers and do not read them: all are dropped, and nothing is kept for them."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "logprobs": 20}
    sizes = []
    with serving({"gpt": models["novels-gpt"]}, limits={"send_seconds": 1}) as running:
        running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else the system takes megabytes
        state = running.server.server_state
        for _ in range(rounds):
            opened = [
                request(running, "/v1/completions", body | {"stream": number % 2 == 0, "seed": number}, 4096)
                for number in range(count)
            ]
            wait_until(lambda: len(state.connections) == count)
            wait_until(lambda: not state.connections, 60)
            check_nothing_leaked(running)
            sizes.append(resident_mb())
            for each in opened:
                each.close()
        with running.client() as client:
            assert client.get("/ready").status_code == 200
    text = f"{count}, {rounds} times: all dropped; {sizes[0]:.0f} MB after the first time"
    growth = sizes[-1] - sizes[0]
    return report("slow readers", f"{text}, {growth:+.0f} MB until the last", growth < 0.2 * sizes[0])


def half_open(models: dict[str, Model], count: int) -> bool:
    """Connections that send nothing, or a part of a request, or end their side: all are closed."""
    whole = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    )
    parts = (b"", b"P", whole[:40], whole, whole + b"\r\n", whole + b"\r\n{", b"\x16\x03\x01\x02\x00\x01", b"\0" * 100)
    with serving({"gpt": models["novels-gpt"]}, limits={"body_seconds": 0.5}) as running:
        address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
        opened, start = [], time.perf_counter()
        for number in range(count):
            opened.append(socket.create_connection(address))
            opened[-1].sendall(parts[number % len(parts)])
            if number % 3 == 2:
                opened[-1].shutdown(socket.SHUT_WR)
        for each in opened:
            each.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                while each.recv(4096):
                    pass
        seconds = time.perf_counter() - start
        with running.client() as client:
            assert client.get("/health").status_code == 200
        check_nothing_leaked(running)
        for each in opened:
            each.close()
    return report("half-open", f"{count}: all closed after {seconds:.1f} s, with a limit of 0.5 s", seconds < 5)


def crashes(models: dict[str, Model], count: int) -> bool:
    """A step that fails under running requests: they end with an error, other models go on, the engine comes back."""
    ended: Counter[str] = Counter()
    with serving(models) as running, running.client() as client, ThreadPoolExecutor(4) as pool:
        for number in range(count):
            served = running.registry.get("novels-gpt")
            wait_until(lambda served=served: served.engine is not None)
            body = {"prompt": PROMPT, "max_tokens": 300, "model": "novels-gpt", "stream": number % 2 == 0}
            answers = [pool.submit(client.post, "/v1/completions", json=body | {"seed": seed}) for seed in range(4)]
            wait_until(lambda served=served: served.stats.running == 4)
            served.engine.engine.step = fail
            ended.update("engine_failed" if "engine_failed" in each.result().text else "other" for each in answers)
            answer = client.post("/translate", json={"q": "Two dogs.", "source": "en", "target": "de"})
            assert answer.status_code == 200
            states = client.get("/ready")
            assert (states.status_code, states.json()["models"]["novels-gpt"]) == (503, "failed")
            wait_until(lambda: client.get("/ready").status_code == 200, 90)
            check_nothing_leaked(running)
    assert ended == {"engine_failed": 4 * count}, ended
    return report("crashes", f"{count}: every request got its error, en-de went on, the engine came back", True)


def fail() -> Any:
    """A step that fails."""
    raise RuntimeError("a kernel failed")


def overload(factor: int, seconds: float, tokens: int = 256) -> bool:
    """Offer many times what the server can do: the refused hear it at once, the admitted get their texts."""
    from tests.serve.offered_load import offer

    settings = "max_waiting: 8\nengine: {max_batch_size: 8}\n"
    with started(["novels-gpt"], settings) as (_, url):
        body = {"prompt": PROMPT, "max_tokens": tokens, "min_tokens": tokens}
        alone = offer(url, body, clients=8, seconds=min(10, seconds))
        capacity = len(alone.done) / alone.seconds
        result = offer(url, body, rate=factor * capacity, seconds=seconds)
        leftover = metrics(url)
    assert not result.wrong, result.wrong[:3]
    assert leftover["pages_used"] == leftover["running"] == leftover["waiting"] == 0, leftover
    late = quantile(result.refused, 0.99)
    goodput = len(result.done) / max(1, len(result.done) + result.cut)
    rate = len(result.done) / result.seconds
    text = f"{factor} x {capacity:.1f} requests/s for {seconds:g} s: {len(result.refused):,} refused, p50 "
    text += (
        f"{1e3 * quantile(result.refused, 0.5):.1f} ms, p99 {1e3 * late:.1f} ms; of {len(result.done) + result.cut} "
    )
    text += f"admitted {goodput:.1%} finished, {rate / capacity:.0%} of the rate without overload"
    return report("overload", text, late <= REFUSE_SECONDS and goodput >= GOODPUT)


def mixed(seconds: float, settle: float, clients: int = 8) -> bool:
    """All kinds of requests, right and wrong, some of them abandoned; how the server's memory grows after a while.

    The KV caches are small, since their pages take memory when they are first used.
    """
    settings = "max_waiting: 16\nengine: {cache_tokens: 4096}\n"
    with started(["novels-gpt", "en-de", "novels-bert"], settings) as (process, url):
        stop, counts = threading.Event(), Counter[str]()
        start, sizes = time.monotonic(), list[tuple[float, float]]()
        with ThreadPoolExecutor(clients) as pool:
            workers = [pool.submit(send_mixed, url, number, stop, counts) for number in range(clients)]
            while time.monotonic() - start < seconds and not any(worker.done() for worker in workers):
                time.sleep(min(5.0, seconds / 10))
                sizes.append((time.monotonic() - start, resident_mb(process.pid)))
                if len(sizes) % 12 == 0:
                    print(f"  {sizes[-1][0] / 60:.0f} min, {sizes[-1][1]:.0f} MB, {counts.total():,}", flush=True)
            stop.set()
        for worker in workers:
            worker.result()
        deadline = time.monotonic() + 20
        while (left := metrics(url))["running"] or left["waiting"] or left["pages_used"]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 0
    assert not any(status.startswith("5") for status in counts), counts
    settled = [size for at, size in sizes if at >= settle]
    growth = statistics.median(settled[-3:]) - statistics.median(settled[:3])
    text = (
        f"{counts.total():,} requests in {seconds / 60:g} min: {dict(counts.most_common())}; {settled[0]:.0f} MB after "
    )
    return report("mixed load", f"{text}{settle:.0f} s, {growth:+.1f} MB until the end", growth < GROWTH_MB)


def send_mixed(url: str, number: int, stop: threading.Event, counts: Counter[str]) -> None:
    """One client of the mixed load."""
    draw = random.Random(number)
    with httpx.Client(base_url=url, timeout=60) as client:
        while not stop.is_set():
            path, body = mixed_request(draw)
            abandon = draw.random() < 0.1
            try:
                with client.stream("POST", path, json=body) as answer:
                    for _ in answer.iter_bytes():
                        if abandon:
                            break
                counts[str(answer.status_code)] += 1
                if answer.status_code == 429:
                    stop.wait(0.2)
            except httpx.ReadTimeout:
                counts["5 timeout"] += 1


def mixed_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Any request."""
    text = " ".join(
        draw.choice(("the", "old", "house", "was", "dark", "and", "she", "said", "nothing")) for _ in range(9)
    )
    words = {"prompt": text, "max_tokens": draw.randint(1, 60), "seed": draw.randrange(1 << 30)}
    schema = {
        "type": "object",
        "properties": {draw.choice("abcdef"): {"type": "boolean"}},
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 30}
    sentence = {"q": text, "source": "en", "target": "de"}
    return draw.choice(
        [
            ("/v1/completions", words),
            ("/v1/completions", words | {"stream": True, "logprobs": 3, "stop": ["the"]}),
            ("/v1/completions", words | {"n": 3, "stream": True}),
            ("/v1/chat/completions", chat | {"stream": draw.random() < 0.5}),
            ("/v1/chat/completions", chat | {"response_format": form}),
            ("/translate", sentence),
            ("/translate", sentence | {"beam": 3}),
            ("/translate", sentence | {"explain": True}),
            ("/v1/embeddings", {"input": [text, text[:20]], "model": "novels-bert"}),
            ("/v1/fill", {"input": text + " [MASK]."}),
            ("/detect", {"q": text}),
            ("/v1/completions", words | {"temperature": -1}),
            (f"/none{draw.randrange(1 << 30)}", {}),
        ]
    )


def metrics(url: str) -> dict[str, float]:
    """The gauges of all models together."""
    found: Counter[str] = Counter()
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("clearhead_") and "{model=" in name:
            found[name.partition("{")[0].removeprefix("clearhead_")] += float(value)
    return found


def resident_mb(pid: int | str = "self") -> float:
    """Resident memory of a process."""
    fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) / 1024


if __name__ == "__main__":
    main()
