"""Training speed against a peer in one run on the same shapes, and the utilization of measured peak matmul FLOPS.

python -m bench.train gpt2           GPT-2 124M, batches of 32 x 1,024 tokens, against transformers (both compiled)
python -m bench.train multi30k       transformer-base on Multi30k's lengths, against torch.nn.Transformer, without
                                     padding tokens; ours packed, the peer's padded, once shuffled, once bucketed
python -m bench.train shakespeare    4 layers of dim 128, context 64, batch 12, against transformers; for a CPU

On a CPU each side has its own processes, in which the peer uses malloc's defaults (ours keeps freed memory, as in
`clearhead train`); sides alternate, and a ratio is the median of the ratios of each round. With
MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 before the command, all keep freed memory.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.sides import Side
from bench.timing import machine, matrix_ceiling
from bench.transformer import Peer
from clearhead.config import ModelConfig, preset
from clearhead.config.data import Corpus, DataConfig, TokenizerConfig
from clearhead.config.train import TrainConfig
from clearhead.data import Batch, Loader, prepare
from clearhead.model import build
from clearhead.model.cost import count_parameters
from clearhead.train.cuda_graph import capture_steps
from clearhead.train.distributed import DistContext, apply_compile, autocast, compute_dtype
from clearhead.train.objective import Objective
from clearhead.train.optimizer import build_optimizer
from clearhead.train.updater import Metrics, Updater

Work = Callable[[], int]  # one step; returns its tokens without padding
OURS, OURS_COMPILED = "ours, eager", "ours, compiled"
PEER_COMPILED, PEER_EAGER = "transformers, compiled", "transformers, eager"
PREPARED = 200  # batches of Multi30k prepared in advance
ROOT = Path(os.environ.get("CLEARHEAD_DATA", "../shared/data"))


def ours(config: ModelConfig, data: DataConfig, settings: TrainConfig, device: torch.device) -> Updater:
    """The updater of `clearhead train`."""
    torch.manual_seed(0)
    network = build(config).to(device)
    objective = Objective(network, data, settings).train()
    apply_compile(objective, settings, DistContext(device))
    optimizer = build_optimizer(network, settings)
    return Updater(objective, objective, optimizer, settings, DistContext(device), compute_dtype(settings, device))


def measure(works: dict[str, Work], device: torch.device, warmup: int, steps: int, rounds: int = 3) -> dict[str, float]:
    """Tokens per second of each side, the median of alternating rounds."""
    speeds: dict[str, list[float]] = {name: [] for name in works}
    for name, work in works.items():
        start = time.perf_counter()
        for _ in range(warmup):
            work()
        print(f"  {name}: {warmup} warmup steps took {time.perf_counter() - start:.0f} s", flush=True)
    for _ in range(rounds):
        for name, work in works.items():
            _synchronize(device)
            start, tokens = time.perf_counter(), 0
            for _ in range(steps):
                tokens += work()
            _synchronize(device)
            speeds[name].append(tokens / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in speeds.items()}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class GPT(NamedTuple):
    """Sizes of a GPT and its batches."""

    layers: int
    dim: int
    heads: int
    context: int
    rows: int
    vocabulary: int

    @property
    def config(self) -> ModelConfig:
        """The config of our model."""
        shape = [f"decoder_layers={self.layers}", f"dim={self.dim}", f"heads={self.heads}"]
        shape += [f"ff_dim={4 * self.dim}", f"max_positions={self.context}", f"vocab_size={self.vocabulary}"]
        return preset("gpt2", [*shape, "dropout=0.0", "attention_dropout=0.0"])

    def batches(self) -> list[Tensor]:
        """Four batches of random tokens, (rows, context + 1)."""
        torch.manual_seed(1)
        return [torch.randint(self.vocabulary, (self.rows, self.context + 1)) for _ in range(4)]


def gpt(shape: GPT, device: torch.device) -> None:
    """A GPT on random tokens, ours and transformers': compiled and, on a CPU, eager as well."""
    if device.type == "cuda":
        works = {name: gpt_step(name, shape, device) for name in (OURS_COMPILED, PEER_COMPILED)}
        speeds = measure(works, device, warmup=5, steps=20)
        ratios = {(OURS_COMPILED, PEER_COMPILED): speeds[OURS_COMPILED] / speeds[PEER_COMPILED]}
    else:
        speeds, ratios = alternate(shape)
    dtype = compute_dtype(TrainConfig(steps=1), device)
    peak, count = matrix_ceiling(device, dtype), count_parameters(build(shape.config, "meta"))
    flops = 6 * count + 12 * shape.layers * shape.dim * shape.context
    size = f"{count:,} parameters, {shape.rows} rows of {shape.context:,} tokens, {dtype}"
    print(f"{size}, peak matmul {peak / 1e12:.2f} TFLOP/s")
    for name, speed in speeds.items():
        print(f"{name:26} {speed:12,.0f} tokens/s   {speed * flops / peak:6.1%} of peak")
    for (one, other), ratio in ratios.items():
        print(f"{one:16} / {other:26} {ratio:.2f}")


def alternate(shape: GPT, processes: int = 3, rounds: int = 6) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Tokens per second of each side on a CPU, and the speed ratios of ours to the peer's.

    The speed of a shared CPU varies over time: many short alternating rounds. That of a process varies with its memory
    layout: several processes.
    """
    results = []
    for _ in range(processes):
        with ExitStack() as stack:
            names = (OURS, OURS_COMPILED, PEER_EAGER, PEER_COMPILED)
            sides = {name: stack.enter_context(Side(gpt_steps, name, shape)) for name in names}
            for side in (*sides.values(), *sides.values()):
                side.run()  # warmup
            results += [{name: side.run() for name, side in sides.items()} for _ in range(rounds)]
    speeds = {name: statistics.median(r[name].result / r[name].clock for r in results) for name in sides}
    pairs = ((ours, peer) for ours in (OURS, OURS_COMPILED) for peer in (PEER_EAGER, PEER_COMPILED))
    return speeds, {pair: statistics.median(r[pair[1]].clock / r[pair[0]].clock for r in results) for pair in pairs}


def gpt_steps(name: str, shape: GPT) -> Work:
    """Twelve steps of one side on a CPU."""
    step = gpt_step(name, shape, torch.device("cpu"))
    return lambda: sum(step() for _ in range(12))


def gpt_step(name: str, shape: GPT, device: torch.device) -> Work:
    """A step of one side."""
    ours, compiled = name in (OURS, OURS_COMPILED), name in (OURS_COMPILED, PEER_COMPILED)
    return our_gpt(shape, device, compiled) if ours else peer_gpt(shape, device, compiled)


def our_gpt(shape: GPT, device: torch.device, compiled: bool) -> Work:
    """A step of `clearhead train`; if compiled, as one graph like the peer."""
    compile = "whole" if compiled else "off"
    settings = TrainConfig(steps=10**6, lr=1e-4, warmup=10, schedule="constant", compile=compile)
    size = shape.rows * shape.context
    data = DataConfig(task="language-model", max_length=shape.context, batch_tokens=size)
    update = capture_steps(ours(shape.config, data, settings, device)).update
    batches = [Batch({"ids": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous()}, size) for x in shape.batches()]
    batches = [batch.pin_memory() for batch in batches] if device.type == "cuda" else batches
    step = iter(range(1, 10**9))

    def work() -> int:
        number = next(step)
        update((batches[number % 4],), number, Metrics())
        return size

    return work


def peer_gpt(shape: GPT, device: torch.device, compiled: bool) -> Work:
    """transformers' GPT-2 with torch's AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    config = GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.context, n_embd=shape.dim, n_layer=shape.layers,
        n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    dtype = compute_dtype(TrainConfig(steps=1), device)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model
    ids = [x[:, :-1].to(device) for x in shape.batches()]
    step = iter(range(10**9))

    def work() -> int:
        x = ids[next(step) % 4]
        with autocast(device, dtype):
            loss = run(input_ids=x, labels=x).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return shape.rows * shape.context

    return work


def multi30k(device: torch.device, tokens: int) -> None:
    """transformer-base on Multi30k's lengths; tokens are counted without padding."""
    with tempfile.TemporaryDirectory() as folder:
        files = tuple(str(ROOT / f"multi30k/train.{side}.gz") for side in ("en", "de"))
        corpus = Corpus(format="parallel", files=files)
        padded = DataConfig(task="translation", train=(corpus,), batch_tokens=tokens, max_length=128, cache_dir=folder)
        packed = padded.model_copy(update={"packed": True})
        tokenizer = TokenizerConfig(kind="bpe", vocab_size=8000)
        data = prepare(padded, tokenizer)
        vocabulary = len(data.tokenizers[0])
        config = preset("transformer-base", [f"vocab_size={vocabulary}", "max_positions=256"])
        settings = TrainConfig(steps=10**6, lr=1e-4, warmup=10, schedule="constant", label_smoothing=0.1)

        def batches(settings: DataConfig, bucket_size: int) -> Iterator[Batch]:
            # A bucket of one batch: shuffled batches that ignore lengths.
            source = prepare(settings, tokenizer).train
            for item in Loader(source, batch_tokens=tokens, bucket_size=bucket_size, pin_memory=device.type == "cuda"):
                yield item.batches[0]

        def our_work(data: DataConfig, bucket_size: int) -> Work:
            update = capture_steps(ours(config, data, settings, device)).update
            items = _repeat(batches(data, bucket_size))
            step = iter(range(1, 10**9))

            def work() -> int:
                batch = next(items)
                update((batch,), next(step), Metrics())
                return batch.num_tokens

            return work

        model = Peer(vocabulary, config).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for layer in (*model.transformer.encoder.layers, *model.transformer.decoder.layers):
            layer.compile(dynamic=True)  # per layer, as ours: compiling the full model takes minutes
        model.score = torch.compile(model.score, dynamic=True)
        run, dtype = model, compute_dtype(settings, device)

        def peer_work(bucket_size: int) -> Work:
            items = _repeat(batches(padded, bucket_size))

            def work() -> int:
                batch = next(items).to(device)
                with autocast(device, dtype):
                    loss = run(batch["source"], batch["target"], batch["labels"], batch["source_lengths"])
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                return batch.num_tokens

            return work

        works = {
            "ours, packed": our_work(packed, 1 << 15),
            "nn.Transformer, shuffled": peer_work(max(1, tokens // 30)),
            "nn.Transformer, bucketed": peer_work(1 << 15),
        }
        speeds = measure(works, device, warmup=PREPARED, steps=50)  # every shape was seen in warmup
        print(f"transformer-base, {count_parameters(build(config, 'meta')):,} parameters, {tokens:,} tokens a batch")
        for name, speed in speeds.items():
            ratio = f"{speeds['ours, packed'] / speed:.2f}x" if name.startswith("nn") else ""
            print(f"{name:26} {speed:12,.0f} tokens/s   {ratio}")


def _repeat(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Repeat prepared batches, to leave out the loader's speed (bench.data measures it)."""
    prepared = [next(batches) for _ in range(PREPARED)]
    while True:
        yield from prepared


def main() -> None:
    """Run a benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=["gpt2", "multi30k", "shakespeare"])
    parser.add_argument("--tokens", type=int, default=16384, help="multi30k: tokens per batch, with padding")
    parser.add_argument("--rows", type=int, default=32, help="gpt2: batch size")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(machine(device), time.strftime("%Y-%m-%d"))
    if options.bench == "gpt2":
        gpt(GPT(12, 768, 12, 1024, options.rows, 50304), device)
    elif options.bench == "shakespeare":
        gpt(GPT(4, 128, 4, 64, 12, 65), torch.device("cpu"))
    else:
        multi30k(device, options.tokens)


if __name__ == "__main__":
    main()
