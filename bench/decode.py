"""Writing text token by token beside transformers' generate on the same weights, in one run: tokens a second.

    python -m bench.decode                        on a GPU: Llama 3.2 1B shape, bf16, 1 and 32 rows; some minutes
    python -m bench.decode --rows 1 --no-peer     one batch size, ours alone
    python -m bench.decode --profile              and which kernels a step spends its time in
    python -m bench.decode --device cpu --small   only the table of cost by context, with the cache and without

Only decoding is timed: 256 tokens behind a prompt of 128, after a run that compiles. `share` is what a step must read,
weights and keys and values, over its time and over the bandwidth that a large matrix-vector product reaches here.
Every part stands by itself: where one fails, its traceback is printed and the rest goes on.
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
from clearhead.inference import enable_cuda_graphs
from clearhead.inference import replay as graphs
from clearhead.inference.generate import prepare_batch
from clearhead.inference.generation_batch import GenerationBatch
from clearhead.model import build
from clearhead.ops.linear.quantized import quantize_module

PROMPT, NEW, RUNS = 128, 256, 3
WANTED = {1: 2.5, 32: 2.8}  # times transformers' static cache


def main() -> None:
    """Parse the options, run every part, print as it goes and a summary last."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--rows", default="1,32", help="batch sizes, separated by commas")
    parser.add_argument("--small", action="store_true", help="only the table of cost by context")
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--no-int8", action="store_true", help="without 8-bit weights")
    parser.add_argument("--profile", action="store_true", help="the kernels of a step")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    torch.manual_seed(0)
    print(f"{datetime.date.today()}  {machine(device)}\n", flush=True)
    if not options.small and device.type == "cuda":
        Large(options, device).run()
    elif not options.small:
        print("the large model is for a GPU; here is the table of cost by context\n")
    with part("cost by context"):
        by_context(device)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Says what is being done and how long it took; an error is printed and ends this part alone."""
    begun = time.perf_counter()
    try:
        yield
    except Exception:
        print(f"{name} FAILED:\n{traceback.format_exc()}", flush=True)
    print(f"  [{name}: {time.perf_counter() - begun:.0f} s]", flush=True)


class Large:
    """A model with random weights, ours and transformers' with the same ones, and what was measured of them."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device, self.peer = options, device, None
        self.bandwidth = float("nan")
        self.rates: dict[tuple[str, int], float] = {}  # tokens a second by name and rows
        self.texts: dict[tuple[str, int], list[list[int]]] = {}

    def run(self) -> None:
        """Everything, the important first."""
        with part("bandwidth"):
            self.bandwidth = matrix_vector_bandwidth(self.device)
        with part("building"):
            self.build()
        sizes = [int(size) for size in self.options.rows.split(",")]
        for rows in sizes:
            with part(f"ours, {rows} rows, compiled"):
                enable_cuda_graphs(self.network, compiled=True)
                self.ours("compiled graphs", self.network, rows)
            if self.peer is not None:
                with part(f"transformers, {rows} rows, static cache"):
                    self.theirs("transformers static", rows, NEW, cache_implementation="static")
        for rows in sizes:
            with part(f"ours, {rows} rows, recorded without compiling"):
                enable_cuda_graphs(self.network)
                self.ours("plain graphs", self.network, rows)
            with part(f"ours, {rows} rows, step by step"):
                graphs._GRAPHS.pop(self.network, None)
                self.ours("no graphs", self.network, rows, runs=1)
            if self.peer is not None:
                with part(f"transformers, {rows} rows, default"):
                    self.theirs("transformers default", rows, 64)
        self.peer = None
        if not self.options.no_int8:
            with part("ours, 1 row, 8-bit weights, compiled"):
                small = quantize_module(copy.deepcopy(self.network))
                enable_cuda_graphs(small, compiled=True)
                self.ours("compiled graphs int8", small, 1)
        self.summary(sizes)

    def build(self) -> None:
        """Ours with random weights; theirs gives us its own where it is wanted."""
        config = preset(self.options.preset)
        if not self.options.no_peer:
            import transformers

            from tests.model.peers import copy as copy_weights
            from tests.model.peers import from_hugging_face

            transformers.logging.set_verbosity_error()
            self.peer = llama(config, self.device)
            theirs, table = from_hugging_face(self.peer)
            self.network = build(theirs, self.device).bfloat16().eval()
            copy_weights(self.network, self.peer, table)
        else:
            self.network = build(config, self.device).bfloat16().eval()
        size = sum(parameter.numel() for parameter in self.network.parameters())
        print(
            f"{self.options.preset}: {size / 1e9:.2f} billion weights, bfloat16, random; prompt {PROMPT}, {NEW} new\n"
        )

    def ours(self, name: str, network: Any, rows: int, runs: int = RUNS) -> None:
        """Our loop, as `generate` runs it."""
        prompts = torch.randint(1, network.config.target_vocab, (rows, PROMPT), generator=_generator(rows)).tolist()
        config, seconds = GenerationConfig(max_new_tokens=NEW + 1), []
        for number in range(runs + 1):
            with torch.inference_mode():
                writing = prepare_batch(network, prompts, None, config, (), [0] * rows)
                torch.cuda.synchronize()
                begun = time.perf_counter()
                outputs = writing.run()
                torch.cuda.synchronize()
            if number:
                seconds.append(time.perf_counter() - begun)
            del writing  # its recording is free for the next
        self.texts[name, rows] = [output.ids for output in outputs]
        self.tell(name, rows, rows * NEW / statistics.median(seconds), network)
        if self.options.profile and "compiled" in name:
            with part("profile"), torch.inference_mode():
                profile(prepare_batch(network, prompts, None, config, (), [0] * rows))

    def theirs(self, name: str, rows: int, new: int, **options: Any) -> None:
        """generate of transformers, timed by the GPU from the first scores to the last."""
        import transformers

        class Clock(transformers.LogitsProcessor):  # type: ignore[misc]
            def __init__(self) -> None:
                self.events: list[torch.cuda.Event] = []

            def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                self.events.append(torch.cuda.Event(enable_timing=True))
                self.events[-1].record()
                return scores

        assert self.peer is not None
        vocabulary = self.network.config.target_vocab
        prompts = torch.randint(1, vocabulary, (rows, PROMPT), generator=_generator(rows)).to(self.device)
        seconds = []
        for _ in range(RUNS + 1):
            clock = Clock()
            found = self.peer.generate(
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
        self.texts[name, rows] = found[:, PROMPT:].tolist()
        self.tell(name, rows, rows * new / statistics.median(seconds[1:]), self.network)

    def tell(self, name: str, rows: int, rate: float, network: Any) -> None:
        """One line of the table, and what the summary needs."""
        self.rates[name, rows] = rate
        share = rate / rows * step_bytes(network, rows, PROMPT + NEW // 2) / self.bandwidth
        line = (
            f"{name:<22} {rows:>3} rows {rate:>9.0f} tokens/s {1e3 * rows / rate:>7.3f} ms a step  share {share:>4.0%}"
        )
        print(line, flush=True)

    def summary(self, sizes: list[int]) -> None:
        """Ratios to transformers, and whether they are what was asked for."""
        print(f"\n{'rows':>4} {'ours':>9} {'static cache':>13} {'ratio':>6} {'wanted':>7} {'share':>6}  same tokens")
        for rows in sizes:
            ours, theirs = (self.rates.get((name, rows)) for name in ("compiled graphs", "transformers static"))
            if ours is None:
                continue
            share = ours / rows * step_bytes(self.network, rows, PROMPT + NEW // 2) / self.bandwidth
            ratio = "" if theirs is None else f"{theirs:>13.0f} {ours / theirs:>5.2f}x"
            same = agreement(self.texts.get(("compiled graphs", rows)), self.texts.get(("transformers static", rows)))
            plain = agreement(self.texts.get(("compiled graphs", rows)), self.texts.get(("no graphs", rows)))
            print(
                f"{rows:>4} {ours:>9.0f} {ratio:<20} {WANTED.get(rows, 0):>6}x {share:>6.0%}  {same}; no graphs {plain}"
            )
        print()


def matrix_vector_bandwidth(device: torch.device) -> float:
    """Bytes a second of the fastest of some products of 2.5 GB of bf16 weights and a vector; a copy beside it."""
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
    print(f"matrix-vector products read {best / 1e12:.2f} TB/s; a copy moves {copied / 1e12:.2f} TB/s", flush=True)
    return best


def step_bytes(network: Any, rows: int, context: int) -> float:
    """What one step has to read: every weight once, and the keys and values of each row."""
    config = network.config
    weights = {id(x): x.numel() * x.element_size() for x in (*network.parameters(), *network.buffers())}
    if config.tie == "none" or network.heads.lm_head.proj.weight.dtype == torch.int8:
        weights.pop(id(network.decoder.embedding.tokens.weight))  # of which a step reads one row for each text
    pairs = 2 * config.decoder_layers * config.kv_heads * config.head_dim * 2
    return sum(weights.values()) + rows * context * pairs


def agreement(ours: list[list[int]] | None, theirs: list[list[int]] | None) -> str:
    """How many tokens are the same up to the first that is not, in the mean of all rows."""
    if ours is None or theirs is None:
        return "-"
    total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{total / len(ours):.0f} of {min(len(ours[0]), len(theirs[0]))}"


def profile(writing: GenerationBatch) -> None:
    """The kernels of some steps, by the time that they take."""
    writing.advance(), writing.advance()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        count = sum(writing.advance().shape[1] for _ in range(2))
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda one: -one.device_time_total)
    print(f"{'µs a step':>10} {'calls':>6}  kernel")
    for one in kernels[:25]:
        print(f"{one.device_time_total / count:>10.1f} {one.count / count:>6.1f}  {one.key[:90]}")
    total = sum(one.device_time_total for one in kernels) / count
    print(f"{total:>10.1f} {sum(one.count for one in kernels) / count:>6.1f}  all", flush=True)


def llama(config: ModelConfig, device: torch.device) -> Any:
    """Their model of the same shape, its rotations in fp32 as after from_pretrained."""
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
