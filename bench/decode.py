"""Decoding speed by batch size and weights, and transformers' generate on the same shape: tokens/s.

    python -m bench.decode                        on a GPU: Llama 3.2 1B shape, batches of 1, 8 and 32; int8 and int4
    python -m bench.decode --rows 1 --no-peer     one batch size, without transformers
    python -m bench.decode --profile              also print the kernels of a step
    python -m bench.decode --device cpu           only the table of step time by context

Only decoding is timed: 256 tokens after a prompt of 128, through the engine. `of limit` is the bytes a step must read
(weights, keys and values) per second, relative to the bandwidth of a large matrix-vector product here. If one part
fails, its traceback is printed and the others still run.
"""

import argparse
import datetime
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from bench.context import by_context
from bench.timing import machine, measure
from clearhead.config import EngineConfig, GenerationConfig, ModelConfig, preset
from clearhead.inference.cuda_step import CudaRunner, cuda_runner
from clearhead.inference.engine import Engine
from clearhead.inference.step import PAGE_SIZE, PagedKVCache
from clearhead.model import build

PROMPT, NEW, RUNS = 128, 256, 3


def main() -> None:
    """Parse the options, run every part, print a summary."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--rows", default="1,8,32", help="batch sizes, separated by commas")
    parser.add_argument("--bits", default="16,8,4", help="bits of a weight, separated by commas")
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    torch.manual_seed(0)
    print(f"{datetime.date.today()}  {machine(device)}\n", flush=True)
    if device.type == "cuda":
        decode_speeds(options, device)
        return
    print("no GPU: only the table of step time by context\n")
    with part("step time by context"):
        by_context(device)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Print how long a part took; an error is printed and ends only this part."""
    start = time.perf_counter()
    try:
        yield
    except Exception:
        print(f"{name} FAILED:\n{traceback.format_exc()}", flush=True)
    print(f"  [{name}: {time.perf_counter() - start:.0f} s]", flush=True)


def decode_speeds(options: argparse.Namespace, device: torch.device) -> None:
    """Print a line for each number of bits and rows, ours and transformers'."""
    config, sizes = preset(options.preset), [int(size) for size in options.rows.split(",")]
    bandwidth = matrix_vector_bandwidth(device)
    network = build(config, device).bfloat16().eval()
    print(f"{options.preset}: {PROMPT} prompt and {NEW} new tokens; random weights\n")
    single: dict[int, float] = {}
    for bits in map(int, options.bits.split(",")):
        with part(f"{bits} bits"):
            pages = max(sizes) * (-(-(PROMPT + NEW) // PAGE_SIZE) + 2) + 64
            runner, reason = cuda_runner(network, PagedKVCache(config, pages, torch.bfloat16, device), max(sizes), bits)
            assert runner is not None, reason
            for rows in sizes:
                speed = ours(network, runner, rows)
                single.setdefault(bits, speed)
                needed = runner.decoder.step_bytes + rows * (PROMPT + NEW / 2) * kv_bytes(config)
                print(
                    f"{bits:>2} bits, batch {rows:>3}: {speed:>8,.0f} tokens/s {1e3 * rows / speed:>7.3f} ms/step "
                    f"{speed / rows * needed / bandwidth:>5.0%} of limit, {single[bits] / single[16]:.2f} times bf16",
                    flush=True,
                )
                if options.profile:
                    profile(partial(ours, network, runner, rows, runs=1), 2 * NEW)
    if options.no_peer:
        return
    peer = llama(config, device)
    for rows in sizes:
        with part(f"transformers, batch {rows}, static cache"):
            speed = theirs(peer, config, rows, device)
            print(f"transformers, batch {rows:>3}: {speed:>8,.0f} tokens/s")


def ours(network: Any, runner: CudaRunner, rows: int, runs: int = RUNS) -> float:
    """Return tokens/s of the engine, from the first token of all rows to the last."""
    prompts = torch.randint(1, network.config.target_vocab, (rows, PROMPT), generator=_generator(rows)).tolist()
    seconds = []
    for number in range(runs + 1):
        engine = Engine(network, eos_ids=(), config=EngineConfig(max_batch_size=rows), runner=runner)
        requests = [engine.submit(prompt, GenerationConfig(max_new_tokens=NEW + 1)) for prompt in prompts]
        while not all(request.ids for request in requests):
            engine.step()
        done, start = sum(len(request.ids) for request in requests), time.perf_counter()
        while engine.busy:
            engine.step()
        elapsed = time.perf_counter() - start
        total = sum(len(request.ids) for request in requests) - done
        if number:
            seconds.append(elapsed / total)
    return 1 / statistics.median(seconds)


def theirs(peer: Any, config: ModelConfig, rows: int, device: torch.device) -> float:
    """Return tokens/s of transformers' generate with a static cache, from the first logits to the last."""
    import transformers

    class Clock(transformers.LogitsProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.events: list[torch.cuda.Event] = []

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()
            return scores

    prompts = torch.randint(1, config.target_vocab, (rows, PROMPT), generator=_generator(rows)).to(device)
    seconds = []
    for _ in range(RUNS + 1):
        clock = Clock()
        peer.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=NEW + 1,
            logits_processor=transformers.LogitsProcessorList([clock]),
            cache_implementation="static",
        )
        torch.cuda.synchronize()
        seconds.append(clock.events[0].elapsed_time(clock.events[-1]) / 1000)
    return rows * NEW / statistics.median(seconds[1:])


def matrix_vector_bandwidth(device: torch.device) -> float:
    """Return the best bytes/s of several matrix-vector products with 2.5 GB of bf16 weights; print a copy's, too."""
    best = 0.0
    for inputs in (2048, 8192):
        weight = torch.randn(1_228_800_000 // inputs, inputs, device=device, dtype=torch.bfloat16)
        x = torch.randn(1, inputs, device=device, dtype=torch.bfloat16)
        for work in (lambda w=weight, x=x: F.linear(x, w), lambda w=weight, x=x: torch.mv(w, x[0])):
            seconds, _ = measure(work, device, seconds=0.2)
            best = max(best, 2 * weight.numel() / seconds)
    target = torch.empty_like(weight)
    seconds, _ = measure(lambda: target.copy_(weight), device, seconds=0.2)
    copied = 4 * weight.numel() / seconds
    print(
        f"bandwidth: {best / 1e12:.2f} TB/s in matrix-vector products, {copied / 1e12:.2f} TB/s in a copy", flush=True
    )
    return best


def kv_bytes(config: ModelConfig) -> int:
    """Return the bytes of keys and values of a token, in bf16."""
    return 4 * config.decoder_layers * config.kv_heads * config.head_dim


def profile(work: Callable[[], object], steps: int) -> None:
    """Print the kernels by time."""
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.device_time_total)
    print(f"{'µs/step':>10} {'calls':>6}  kernel")
    for kernel in kernels[:20]:
        print(f"{kernel.device_time_total / steps:>10.1f} {kernel.count / steps:>6.1f}  {kernel.key[:80]}")
    total = sum(kernel.device_time_total for kernel in kernels) / steps
    print(f"{total:>10.1f} {sum(kernel.count for kernel in kernels) / steps:>6.1f}  all", flush=True)


def llama(config: ModelConfig, device: torch.device) -> Any:
    """Build transformers' model of the same shape, with fp32 RoPE tables as after from_pretrained."""
    import transformers

    assert config.rope_scaling is not None
    rope = {
        "rope_type": "llama3",
        "rope_theta": config.rope_theta,
        "factor": config.rope_scaling.factor,
        "low_freq_factor": config.rope_scaling.low_frequency_factor,
        "high_freq_factor": config.rope_scaling.high_frequency_factor,
        "original_max_position_embeddings": config.rope_scaling.original_positions,
    }
    settings = transformers.LlamaConfig(
        vocab_size=config.target_vocab,
        hidden_size=config.dim,
        intermediate_size=config.ff_dim,
        num_hidden_layers=config.decoder_layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie != "none",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()


def _generator(rows: int) -> torch.Generator:
    return torch.Generator().manual_seed(rows)


if __name__ == "__main__":
    main()
