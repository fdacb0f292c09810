"""Decoding speed against transformers' generate on the same weights: tokens/s and ratios.

    python -m bench.decode                        on a GPU: Llama 3.2 1B shape, bf16, batches of 1 and 32; a few minutes
    python -m bench.decode --rows 1 --no-peer     one batch size, without transformers
    python -m bench.decode --profile              also print the kernels of a step
    python -m bench.decode --device cpu --context-only   only the table of step time by context

Only decoding is timed: 256 tokens after a prompt of 128, following a warm-up run that compiles. `of limit` is the bytes
a step must read (weights, keys and values) per second, relative to the bandwidth of a large matrix-vector product here.
If one part fails, its traceback is printed and the others still run.
"""

import argparse
import copy
import datetime
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from bench.context import by_context
from bench.timing import machine, measure
from clearhead.config import GenerationConfig, ModelConfig, preset
from clearhead.inference import cuda_graph_replay as graphs
from clearhead.inference import enable_cuda_graphs
from clearhead.inference.generate import prepare_batch
from clearhead.inference.generation_batch import GenerationBatch
from clearhead.model import build
from tests.quantization import quantize_module

PROMPT, NEW, RUNS = 128, 256, 3
TARGETS = {1: 2.5, 32: 2.8}  # speedup over transformers' static cache, by batch size


def main() -> None:
    """Parse the options, run every part, print a summary."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--rows", default="1,32", help="batch sizes, separated by commas")
    parser.add_argument("--context-only", action="store_true", help="only the table of step time by context")
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--no-int8", action="store_true", help="without int8 weights")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    torch.manual_seed(0)
    print(f"{datetime.date.today()}  {machine(device)}\n", flush=True)
    if not options.context_only and device.type == "cuda":
        DecodeBench(options, device).run()
    elif not options.context_only:
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


class DecodeBench:
    """A randomly initialized model in Clearhead and in transformers, and its measurements."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device, self.peer = options, device, None
        self.bandwidth = float("nan")
        self.speeds: dict[tuple[str, int], float] = {}  # tokens/s by name and batch size
        self.tokens: dict[tuple[str, int], list[list[int]]] = {}

    def run(self) -> None:
        """Run every part, the most important first."""
        with part("bandwidth"):
            self.bandwidth = matrix_vector_bandwidth(self.device)
        with part("building"):
            self.build()
        sizes = [int(size) for size in self.options.rows.split(",")]
        for rows in sizes:
            with part(f"clearhead, batch {rows}, compiled CUDA graphs"):
                enable_cuda_graphs(self.network, compiled=True)
                self.ours("compiled graphs", self.network, rows)
            if self.peer is not None:
                with part(f"transformers, batch {rows}, static cache"):
                    self.theirs("transformers static", rows, NEW, cache_implementation="static")
        for rows in sizes:
            with part(f"clearhead, batch {rows}, CUDA graphs"):
                enable_cuda_graphs(self.network)
                self.ours("plain graphs", self.network, rows)
            with part(f"clearhead, batch {rows}, eager"):
                graphs._GRAPHS.pop(self.network, None)
                self.ours("eager", self.network, rows, runs=1)
            if self.peer is not None:
                with part(f"transformers, batch {rows}, default cache"):
                    self.theirs("transformers default", rows, 64)
        self.peer = None
        if not self.options.no_int8:
            with part("clearhead, batch 1, int8 weights, compiled CUDA graphs"):
                quantized = quantize_module(copy.deepcopy(self.network))
                enable_cuda_graphs(quantized, compiled=True)
                self.ours("compiled graphs int8", quantized, 1)
        self.summary(sizes)

    def build(self) -> None:
        """Build the models with the same random weights."""
        config = preset(self.options.preset)
        if not self.options.no_peer:
            import transformers

            from tests.model.peers import copy as copy_weights
            from tests.model.peers import from_hugging_face

            transformers.logging.set_verbosity_error()
            self.peer = llama(config, self.device)
            imported, table = from_hugging_face(self.peer)
            self.network = build(imported, self.device).bfloat16().eval()
            copy_weights(self.network, self.peer, table)
        else:
            self.network = build(config, self.device).bfloat16().eval()
        size = sum(parameter.numel() for parameter in self.network.parameters())
        print(
            f"{self.options.preset}: {size / 1e9:.2f}B random parameters, bf16; {PROMPT} prompt and {NEW} new tokens\n"
        )

    def ours(self, name: str, network: Any, rows: int, runs: int = RUNS) -> None:
        """Time our decode loop, as `generate` runs it."""
        prompts = torch.randint(1, network.config.target_vocab, (rows, PROMPT), generator=_generator(rows)).tolist()
        config, seconds = GenerationConfig(max_new_tokens=NEW + 1), []
        for number in range(runs + 1):
            with torch.inference_mode():
                batch = prepare_batch(network, prompts, None, config, (), [0] * rows)
                torch.cuda.synchronize()
                start = time.perf_counter()
                outputs = batch.run()
                torch.cuda.synchronize()
            if number:
                seconds.append(time.perf_counter() - start)
            del batch  # frees its graph for the next run
        self.tokens[name, rows] = [output.ids for output in outputs]
        self.report(name, rows, rows * NEW / statistics.median(seconds), network)
        if self.options.profile and "compiled" in name:
            with part("profile"), torch.inference_mode():
                profile(prepare_batch(network, prompts, None, config, (), [0] * rows))

    def theirs(self, name: str, rows: int, new: int, **options: Any) -> None:
        """Time transformers' generate with CUDA events, from the first logits to the last."""
        import transformers

        class Clock(transformers.LogitsProcessor):  # type: ignore[misc]
            def __init__(self) -> None:
                self.events: list[torch.cuda.Event] = []

            def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                self.events.append(torch.cuda.Event(enable_timing=True))
                self.events[-1].record()
                return scores

        assert self.peer is not None
        vocab_size = self.network.config.target_vocab
        prompts = torch.randint(1, vocab_size, (rows, PROMPT), generator=_generator(rows)).to(self.device)
        seconds = []
        for _ in range(RUNS + 1):
            clock = Clock()
            outputs = self.peer.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                max_new_tokens=new + 1,
                logits_processor=transformers.LogitsProcessorList([clock]),
                **options,
            )
            torch.cuda.synchronize()
            assert len(clock.events) == new + 1, f"{len(clock.events)} steps"
            seconds.append(clock.events[0].elapsed_time(clock.events[-1]) / 1000)
        self.tokens[name, rows] = outputs[:, PROMPT:].tolist()
        self.report(name, rows, rows * new / statistics.median(seconds[1:]), self.network)

    def report(self, name: str, rows: int, speed: float, network: Any) -> None:
        """Print a line of the table and keep the speed for the summary."""
        self.speeds[name, rows] = speed
        of_limit = speed / rows * step_bytes(network, rows, PROMPT + NEW // 2) / self.bandwidth
        line = (
            f"{name:<22} batch {rows:>3} {speed:>9.0f} tokens/s {1e3 * rows / speed:>7.3f} ms/step "
            f"{of_limit:>5.0%} of limit"
        )
        print(line, flush=True)

    def summary(self, sizes: list[int]) -> None:
        """Print the ratios to transformers and the targets."""
        columns = f"{'clearhead':>9} {'transformers':>13} {'ratio':>6} {'target':>7} {'of limit':>8}"
        print(f"\ntokens/s; transformers with its static cache\n{'batch':>5} {columns}  equal tokens")
        for rows in sizes:
            ours, theirs = (self.speeds.get((name, rows)) for name in ("compiled graphs", "transformers static"))
            if ours is None:
                continue
            of_limit = ours / rows * step_bytes(self.network, rows, PROMPT + NEW // 2) / self.bandwidth
            ratio = "" if theirs is None else f"{theirs:>13.0f} {ours / theirs:>5.2f}x"
            equal = agreement(
                self.tokens.get(("compiled graphs", rows)), self.tokens.get(("transformers static", rows))
            )
            eager = agreement(self.tokens.get(("compiled graphs", rows)), self.tokens.get(("eager", rows)))
            print(
                f"{rows:>5} {ours:>9.0f} {ratio:<20} {TARGETS.get(rows, 0):>6}x {of_limit:>8.0%}  "
                f"{equal}; to eager {eager}"
            )
        print()


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


def step_bytes(network: Any, rows: int, context: int) -> float:
    """Return the bytes a step must read: every weight once, and the keys and values of each row."""
    config = network.config
    weights = {id(x): x.numel() * x.element_size() for x in (*network.parameters(), *network.buffers())}
    if config.tie == "none" or network.heads.lm_head.proj.weight.dtype == torch.int8:
        weights.pop(id(network.decoder.embedding.tokens.weight))  # a step reads one row per sequence
    kv_bytes = 2 * config.decoder_layers * config.kv_heads * config.head_dim * 2
    return sum(weights.values()) + rows * context * kv_bytes


def agreement(ours: list[list[int]] | None, theirs: list[list[int]] | None) -> str:
    """Describe the mean number of equal tokens before the first difference."""
    if ours is None or theirs is None:
        return "-"
    total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{total / len(ours):.0f} of {min(len(ours[0]), len(theirs[0]))}"


def profile(batch: GenerationBatch) -> None:
    """Print the kernels of a step by time."""
    batch.advance(), batch.advance()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps = sum(batch.advance().shape[1] for _ in range(2))
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.device_time_total)
    print(f"{'µs/step':>10} {'calls':>6}  kernel")
    for kernel in kernels[:25]:
        print(f"{kernel.device_time_total / steps:>10.1f} {kernel.count / steps:>6.1f}  {kernel.key[:90]}")
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
