"""The HTTP server under 1, 16 and 64 clients, beside the bare engine, and beside llama.cpp's server on SmolLM2.

    python -m bench.serve                                novels-gpt and en-de, a minute for each number of clients
    python -m bench.serve --seconds 5 --clients 1 16     shorter
    python -m bench.serve --peer                         SmolLM2 int8 against llama.cpp's server with Q8_0, too
    python -m bench.serve --preset llama3.2-1b --device cuda --models --clients 64    random weights on a GPU

The server is `clearhead serve` in a process of its own, on loopback; the clients are in one process, and stream what
the decoder writes. The bare engine is driven in a loop with requests of the same kind, and as many of them at a time.
"CPU" is CPU seconds per thousand tokens, without those of the clients: on a shared machine the ratio of these is more
stable than that of tokens/s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.http_load import Load, run_clients
from bench.sides import Side
from bench.timing import machine

NEW_TOKENS = 64
SUBJECTS = ("dogs", "children", "men", "women", "birds", "horses", "players", "students", "girls", "boys", "workers")
VERBS = ("playing", "sitting", "standing", "running", "walking", "sleeping", "waiting", "talking", "eating", "singing")
PLACES = ("snow", "park", "street", "garden", "house", "school", "station", "kitchen", "field", "city", "water", "car")
PAIR = re.compile("[a-z]{2}-[a-z]{2}$")  # a translator's name
OURS: dict[str, Any] = {"min_tokens": NEW_TOKENS}  # every text gets all its tokens
THEIRS: dict[str, Any] = {"ignore_eos": True}
Request = tuple[str, bytes]  # path and body


def main() -> None:
    """Parse the options, measure every model."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["novels-gpt", "en-de"])
    parser.add_argument("--preset", help="a decoder with random weights and novels-gpt's tokenizer")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warmup", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="server and bare engine take turns; the best counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--whole", action="store_true", help="answers at once instead of streams")
    parser.add_argument("--peer", action="store_true", help="llama.cpp's server on SmolLM2, too")
    options = parser.parse_args()
    device = torch.device("cuda" if options.device == "cuda" else "cpu")
    print(f"{datetime.date.today()}  {machine(device)}, {os.cpu_count()} cores; {options.seconds:g} s\n", flush=True)
    for name in options.models:
        compare(name, name, options)
    with tempfile.TemporaryDirectory() as folder:
        if options.preset:
            compare(options.preset, random_model(options.preset, Path(folder)), options)
        if options.peer:
            peer(Path(folder), options)


def compare(name: str, model: str, options: argparse.Namespace) -> None:
    """Measure one model behind the server and without it."""
    print(f"{name:<14} {'tokens/s':>9} {'first token p50, p99 ms':>24} {'bare':>8} {'ratio':>6} {'CPU':>6} {'bare':>6}")
    make = partial(translation if PAIR.search(name) else partial(completion, not options.whole, OURS), name)
    single = 0.0
    with (
        served([f"{name}={model}"], options) as (process, url),
        Side(bare, name, model, options) as side,
    ):
        for clients in options.clients:
            best: tuple[float, Load, float] | None = None
            alone = (0.0, 0.0)
            for turn in range(options.rounds):
                speed, load, cpu = drive(url, make, clients, options, process.pid, name, turn)
                best = max(best or (0.0, load, 0.0), (speed, load, cpu), key=lambda each: each[0])
                alone = max(alone, side.run(clients).result)
            assert best is not None
            speed, load, cpu = best
            single = single or speed
            print(
                f"{clients:>3} clients    {speed:>9,.0f} {load.quantile(load.first, 0.5):>12.1f} "
                f"{load.quantile(load.first, 0.99):>11.1f} {alone[0]:>8,.0f} {speed / alone[0]:>6.0%} {cpu:>6.2f} "
                f"{alone[1]:>6.2f}   {speed / single:.1f} x {options.clients[0]} client",
                flush=True,
            )
            if load.errors:
                print(f"  {len(load.errors)} ERRORS, the first: {load.errors[0]!r}")
    print()


def peer(folder: Path, options: argparse.Namespace) -> None:
    """SmolLM2 in int8 behind our server, and in Q8_0 behind llama.cpp's."""
    from clearhead.checkpoint import load_model
    from clearhead.checkpoint.formats import gguf_write, pull

    path = pull.pull("smollm2")
    gguf_write.write_q8_0(load_model(path, torch.device("cpu")), folder)
    options = argparse.Namespace(**{**vars(options), "dtype": "int8", "device": "cpu"})
    print(f"{'SmolLM2-135M':<14} {'tokens/s':>9} {'first token p50, p99 ms':>24}")
    with (
        served([f"smollm2={path}"], options) as (_, url),
        Side(llama_server, folder / gguf_write.FILE, max(options.clients)) as side,
    ):
        servers = (("clearhead int8", url, OURS), ("llama.cpp Q8_0", side.run().result, THEIRS))
        for clients, (name, address, to_the_limit) in itertools.product(options.clients, servers):
            make = partial(completion, True, to_the_limit, "smollm2")
            load, seconds, _ = asyncio.run(run_clients(address, make, clients, options.seconds, options.warmup))
            print(
                f"{clients:>3} clients    {load.tokens / seconds:>9,.1f} {load.quantile(load.first, 0.5):>12.1f} "
                f"{load.quantile(load.first, 0.99):>11.1f}   {name}",
                flush=True,
            )
            if load.errors:
                print(f"  {len(load.errors)} ERRORS, the first: {load.errors[0]!r}")


def llama_server(path: Path, slots: int) -> Callable[[], str]:
    """Start llama.cpp's server with a slot for each client; return a function that gives its URL."""
    import xllamacpp  # type: ignore[import-untyped]

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it logs a lot to stderr
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_parallel, settings.n_ctx = str(path), slots, 256 * slots
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    settings.hostnames, settings.port = ["127.0.0.1"], free_port()
    server = xllamacpp.Server(settings)
    return lambda: server.listening_address


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def drive(
    url: str, make: Callable[[int], Request], clients: int, options: argparse.Namespace, pid: int, name: str, turn: int
) -> tuple[float, Load, float]:
    """Run the clients; return tokens/s, what they saw, and CPU seconds per 1,000 tokens."""
    edges: list[float] = []

    def tokens() -> float:
        edges.append(cpu_seconds(pid))
        return new_tokens(url, name)

    first = (turn * 1000 + clients) * 1_000_000
    load, seconds, count = asyncio.run(
        run_clients(url, make, clients, options.seconds, options.warmup, tokens, first_number=first)
    )
    return count / seconds, load, 1e3 * (edges[1] - edges[0]) / max(count, 1)


def completion(stream: bool, to_the_limit: dict[str, Any], model: str, number: int) -> Request:
    """A prompt to continue."""
    body: dict[str, Any] = {"model": model, "prompt": prompt(number), "max_tokens": NEW_TOKENS, "seed": number}
    body |= {"temperature": 0.8} | to_the_limit
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return "/v1/completions", json.dumps(body).encode()


def translation(model: str, number: int) -> Request:
    """A sentence to translate."""
    body = {"q": sentence(number), "source": model[-5:-3], "target": model[-2:], "model": model}
    return "/translate", json.dumps(body).encode()


def prompt(number: int) -> str:
    """A prompt of about 20 tokens that no other number has."""
    return f"Chapter {number % 97}. {sentence(number)} It was a dark evening in October when the"


def sentence(number: int) -> str:
    """An English sentence."""
    draw = random.Random(number)
    who, what, where, near = (draw.choice(words) for words in (SUBJECTS, VERBS, PLACES, PLACES))
    return f"{draw.randint(2, 99)} {who} are {what} in the {where} near the {near}."


def bare(name: str, model: str, options: argparse.Namespace) -> Callable[[int], tuple[float, float]]:
    """Return a function that keeps as many sequences running as there are clients: tokens/s, CPU seconds per 1,000."""
    from clearhead.predict import load
    from clearhead.predict.batch_generate import engine_for, submit

    loaded = load(model, options.device, options.dtype)
    numbers = itertools.count(1 << 40)
    is_translator = loaded.config.family != "decoder"

    def run(clients: int) -> tuple[float, float]:
        engine, tokens = engine_for(loaded), 0

        def start() -> None:
            number = next(numbers)
            if is_translator:
                submit(loaded, engine, sentence(number))
            else:
                lengths: Any = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
                submit(loaded, engine, prompt(number), seed=number, temperature=0.8, **lengths)

        for _ in range(clients):
            start()
        warm = time.perf_counter() + options.warmup
        begin, cpu = 0.0, 0.0
        while not begin or time.perf_counter() < begin + options.seconds:
            for request in engine.step():
                if request.done:
                    tokens += len(request.ids)
                    start()
            if not begin and time.perf_counter() > warm:
                begin, cpu, tokens = time.perf_counter(), time.process_time(), 0
        speed = tokens / (time.perf_counter() - begin)
        return speed, 1e3 * (time.process_time() - cpu) / max(tokens, 1)

    return run


@contextlib.contextmanager
def served(models: list[str], options: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`clearhead serve` on a free port, and its URL."""
    command = [sys.executable, "-m", "clearhead", "serve", *models, "--port", "0", "--device", options.device]
    command += ["--dtype", options.dtype] if options.dtype else []
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, text=True)
        try:
            while True:
                log.seek(0)
                text = log.read()
                if found := re.search(r"http://\S+", text):
                    break
                if process.poll() is not None:
                    raise SystemExit(f"the server ended: {text[-2000:]}")
                time.sleep(0.1)
            wait_for(f"{found[0]}/health")
            yield process, found[0]
        finally:
            process.kill()
            process.wait()


def wait_for(url: str, seconds: float = 60) -> None:
    """Wait until a URL answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def new_tokens(url: str, model: str) -> float:
    """Return how many tokens the server has generated for finished requests, from its metrics."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    found = re.search(rf'^clearhead_new_tokens_total{{model="{re.escape(model)}"}} (\S+)$', text, re.M)
    return float(found[1]) if found else 0.0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def random_model(name: str, folder: Path) -> str:
    """Save a preset with random weights and novels-gpt's tokenizer, filled up to its vocabulary; return its folder."""
    import tokenizers

    from clearhead.checkpoint import load_model, save_model
    from clearhead.config import preset
    from clearhead.model import build
    from clearhead.predict.find import find_model
    from clearhead.text import Tokenizer

    torch.manual_seed(0)
    config, small = preset(name), load_model(find_model("novels-gpt"))
    state = json.loads(small.tokenizers[-1].engine.to_str())
    vocab = state["model"]["vocab"]
    vocab.update({f"x{number}": number for number in range(len(vocab), config.target_vocab)})
    filled = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)))
    save_model(folder / name, build(config), filled, small.extra)
    return str(folder / name)


if __name__ == "__main__":
    main()
