"""Throughput of the engine on a GPU, with transformers' continuous batching on the same weights and requests.

    python -m bench.engine                 Llama 3.2 1B shape, bf16: 256 requests of 100 to 1,024 random tokens each way
    python -m bench.engine --no-peer       without transformers
    python -m bench.engine --requests 64 --shared 2000     requests with a common prompt

Prints tokens/s, time to the first token, the share of the memory-bandwidth limit (weights once a step, and all keys and
values) and the host's time per step. The weights are random; every request runs to its limit.
"""

import argparse
import datetime
import random
import statistics
import time
import traceback
from typing import Any

import torch

from bench.decode import kv_bytes, llama, matrix_vector_bandwidth
from bench.timing import machine
from clearhead.config import EngineConfig, GenerationConfig, preset
from clearhead.inference.cuda_step import cuda_runner
from clearhead.inference.engine import Engine
from clearhead.inference.step import PAGE_SIZE, PagedKVCache
from clearhead.model import build

Request = tuple[list[int], int]  # prompt and number of new tokens


def main() -> None:
    """Parse the options and run both engines."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs=2, default=(100, 1024), help="of prompts and of outputs")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--rows", type=int, default=256, help="requests that run at a time")
    parser.add_argument("--bits", type=int, default=16, choices=(16, 8, 4))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    print(f"{datetime.date.today()}  {machine(device)}\n", flush=True)
    config = preset(options.preset)
    requests = make_requests(options, config.target_vocab)
    network = build(config, device).bfloat16().eval()
    speed = ours(network, requests, options, matrix_vector_bandwidth(device))
    if not options.no_peer:
        try:
            peer = theirs(llama(config, device), requests)
            print(f"clearhead is {speed / peer:.1f} times as fast")
        except Exception:
            print(f"transformers FAILED:\n{traceback.format_exc()}")


def make_requests(options: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Return random prompts and numbers of new tokens."""
    draw, (shortest, longest) = random.Random(0), options.lengths

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1, vocab_size) for _ in range(count)]

    shared = tokens(options.shared)
    return [
        (shared + tokens(draw.randint(shortest, longest)), draw.randint(shortest, longest))
        for _ in range(options.requests)
    ]


def ours(network: Any, requests: list[Request], options: argparse.Namespace, bandwidth: float) -> float:
    """Run the requests; return tokens/s."""
    config, device = network.config, torch.device("cuda")
    tokens = sum(len(prompt) + new for prompt, new in requests)
    cache = PagedKVCache(config, min(tokens // PAGE_SIZE + len(requests) + 64, 1 << 17), torch.bfloat16, device)
    start = time.perf_counter()
    runner, reason = cuda_runner(network, cache, options.rows, options.bits)
    assert runner is not None, reason
    runner.warmup()
    torch.cuda.synchronize()
    print(f"runner and graphs: {time.perf_counter() - start:.1f} s", flush=True)
    limits = EngineConfig(max_batch_size=options.rows, max_queue=len(requests))
    best = 0.0
    for _ in range(options.runs):
        engine = Engine(network, eos_ids=(), config=limits, runner=runner)
        torch.cuda.synchronize()
        start = time.perf_counter()
        submitted = [engine.submit(ids, GenerationConfig(max_new_tokens=new)) for ids, new in requests]
        first: dict[int, float] = {}
        host, steps = 0.0, []
        while engine.busy:
            begin = time.perf_counter()
            for request in engine.step():
                first.setdefault(id(request), time.perf_counter() - start)
            steps.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        assert all(len(r.ids) == new for r, (_, new) in zip(submitted, requests, strict=True)), "not all tokens"
        new_tokens = sum(new for _, new in requests)
        contexts = sum(new * (len(prompt) + new / 2) for prompt, new in requests)
        read = max(new for _, new in requests) * runner.decoder.step_bytes + contexts * kv_bytes(config)
        waits = sorted(first.values())
        best = max(best, new_tokens / seconds)
        print(
            f"clearhead: {new_tokens:,} tokens in {seconds:.2f} s, {new_tokens / seconds:,.0f} tokens/s; "
            f"first token p50 {statistics.median(waits):.2f} s, p99 {waits[int(0.99 * len(waits))]:.2f} s; "
            f"{read / bandwidth / seconds:.0%} of the bandwidth limit; {len(steps)} steps, median "
            f"{1e3 * statistics.median(steps):.2f} ms, longest {1e3 * max(steps):.0f} ms; "
            f"{engine.stats.prompt_tokens:,} prompt tokens computed, {engine.stats.cached_prompt_tokens:,} shared",
            flush=True,
        )
        del engine, host
    return best


def theirs(model: Any, requests: list[Request]) -> float:
    """Run the requests in transformers' continuous batching with CUDA graphs; return tokens/s."""
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    generation = transformers.GenerationConfig(do_sample=False, max_new_tokens=1024, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(use_cuda_graph=True)
    best = 0.0
    for count in (8, len(requests)):  # a warm-up first
        manager = model.init_continuous_batching(generation, continuous_batching_config=batching)
        manager.start()
        start = time.perf_counter()
        for ids, new in requests[:count]:
            manager.add_request(ids, max_new_tokens=new)
        tokens = finished = 0
        while finished < count:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                finished, tokens = finished + 1, tokens + len(result.generated_tokens)
            if time.perf_counter() - start > 200 or (result is None and not manager.is_running()):
                raise RuntimeError(f"stopped after {finished} requests and {tokens} tokens")
        seconds = time.perf_counter() - start
        manager.stop(block=True)
        best = tokens / seconds
        print(f"transformers: {tokens:,} tokens in {seconds:.1f} s, {best:,.0f} tokens/s", flush=True)
    return best


if __name__ == "__main__":
    main()
