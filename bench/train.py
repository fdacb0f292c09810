"""Training speed, us and the peer in one run on the same shapes, and the share of the machine's matrix ceiling.

python -m bench.train gpt2           GPT-2 124M, 32 rows of 1,024 tokens, beside transformers (both compiled)
python -m bench.train multi30k       transformer-base on Multi30k's real lengths, beside torch.nn.Transformer; real
                                     tokens count; ours are packed, its batches padded, once shuffled, once bucketed
python -m bench.train shakespeare    4 layers of width 128, context 64, batch 12, beside transformers; for a CPU

There each has processes of its own, in which the peer's memory stays as it comes (ours holds what it frees, as in
`clearhead train`); they take turns, and a ratio is the median of the ratios of each turn. With
MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 before the command, all hold it.
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
from clearhead.train.distributed import DistContext, apply_compile, autocast, precision
from clearhead.train.objective import Objective
from clearhead.train.optimizer import build_optimizer
from clearhead.train.updater import Progress, Updater

Work = Callable[[], int]  # one step; gives its real tokens
OURS, WHOLE = "ours, eager", "ours, compiled"
COMPILED, EAGER = "transformers, compiled", "transformers, eager"
AHEAD = 200  # batches of Multi30k made beforehand
ROOT = Path(os.environ.get("CLEARHEAD_DATA", "../shared/data"))


def ours(config: ModelConfig, data: DataConfig, settings: TrainConfig, device: torch.device) -> Updater:
    """Our updater, as `clearhead train` sets it up."""
    torch.manual_seed(0)
    network = build(config).to(device)
    objective = Objective(network, data, settings).train()
    apply_compile(objective, settings, DistContext(device))
    adam = build_optimizer(network, settings)
    return Updater(objective, objective, adam, settings, DistContext(device), precision(settings, device))


def rates(works: dict[str, Work], device: torch.device, warm: int, steps: int, rounds: int = 3) -> dict[str, float]:
    """Tokens a second of each, the median of some rounds taken in turn."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for name, work in works.items():
        begun = time.perf_counter()
        for _ in range(warm):
            work()
        print(f"  {name}: {warm} steps to get warm took {time.perf_counter() - begun:.0f} s", flush=True)
    for _ in range(rounds):
        for name, work in works.items():
            _wait(device)
            begun, tokens = time.perf_counter(), 0
            for _ in range(steps):
                tokens += work()
            _wait(device)
            found[name].append(tokens / (time.perf_counter() - begun))
    return {name: statistics.median(each) for name, each in found.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class GPT(NamedTuple):
    """The shape of a GPT and of its batches."""

    layers: int
    dim: int
    heads: int
    context: int
    rows: int
    vocabulary: int

    @property
    def config(self) -> ModelConfig:
        """As ours."""
        shape = [f"decoder_layers={self.layers}", f"dim={self.dim}", f"heads={self.heads}"]
        shape += [f"ff_dim={4 * self.dim}", f"max_positions={self.context}", f"vocab_size={self.vocabulary}"]
        return preset("gpt2", [*shape, "dropout=0.0", "attention_dropout=0.0"])

    def batches(self) -> list[Tensor]:
        """Four batches of random tokens, (rows, context + 1)."""
        torch.manual_seed(1)
        return [torch.randint(self.vocabulary, (self.rows, self.context + 1)) for _ in range(4)]


def gpt(shape: GPT, device: torch.device) -> None:
    """A GPT on random tokens, ours and transformers': both compiled and, on a CPU, both eager as well."""
    if device.type == "cuda":
        found = rates({name: gpt_step(name, shape, device) for name in (WHOLE, COMPILED)}, device, warm=5, steps=20)
        ratios = {(WHOLE, COMPILED): found[WHOLE] / found[COMPILED]}
    else:
        found, ratios = in_turn(shape)
    dtype = precision(TrainConfig(steps=1), device)
    ceiling, count = matrix_ceiling(device, dtype), count_parameters(build(shape.config, "meta"))
    flops = 6 * count + 12 * shape.layers * shape.dim * shape.context
    size = f"{count:,} parameters, {shape.rows} rows of {shape.context:,} tokens, {dtype}"
    print(f"{size}, matrix ceiling {ceiling / 1e12:.2f} TFLOP/s")
    for name, rate in found.items():
        print(f"{name:26} {rate:12,.0f} tokens/s   {rate * flops / ceiling:6.1%} of the ceiling")
    for (one, other), ratio in ratios.items():
        print(f"{one:16} to {other:26} {ratio:.2f}")


def in_turn(shape: GPT, lives: int = 3, rounds: int = 6) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Tokens a second of each on a CPU, and how many times as fast ours are as theirs.

    A CPU is shared and has good and bad minutes: many short turns, so that each side has its part of both. A process
    has good and bad luck with its memory: several lives.
    """
    turns = []
    for _ in range(lives):
        with ExitStack() as stack:
            names = (OURS, WHOLE, EAGER, COMPILED)
            sides = {name: stack.enter_context(Side(gpt_turn, name, shape)) for name in names}
            for side in (*sides.values(), *sides.values()):
                side.run()  # to get warm
            turns += [{name: side.run() for name, side in sides.items()} for _ in range(rounds)]
    found = {name: statistics.median(turn[name].result / turn[name].clock for turn in turns) for name in sides}
    pairs = ((one, other) for one in (OURS, WHOLE) for other in (EAGER, COMPILED))
    return found, {
        pair: statistics.median(turn[pair[1]].clock / turn[pair[0]].clock for turn in turns) for pair in pairs
    }


def gpt_turn(name: str, shape: GPT) -> Work:
    """Twelve steps of one side on a CPU."""
    step = gpt_step(name, shape, torch.device("cpu"))
    return lambda: sum(step() for _ in range(12))


def gpt_step(name: str, shape: GPT, device: torch.device) -> Work:
    """A step of one side."""
    ours, compiled = name in (OURS, WHOLE), name in (WHOLE, COMPILED)
    return our_gpt(shape, device, compiled) if ours else peer_gpt(shape, device, compiled)


def our_gpt(shape: GPT, device: torch.device, compiled: bool) -> Work:
    """As `clearhead train`; compiled, if at all, as a whole, as the peer."""
    compile = "whole" if compiled else "off"
    settings = TrainConfig(steps=10**6, lr=1e-4, warmup=10, schedule="constant", compile=compile)
    size = shape.rows * shape.context
    data = DataConfig(task="language-model", max_length=shape.context, batch_tokens=size)
    update = capture_steps(ours(shape.config, data, settings, device)).update
    batches = [
        Batch({"ids": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous()}, size) for x in shape.batches()
    ]  # as the loader gives them
    batches = [batch.pin() for batch in batches] if device.type == "cuda" else batches
    step = iter(range(1, 10**9))

    def work() -> int:
        number = next(step)
        update((batches[number % 4],), number, Progress())
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
    dtype = precision(TrainConfig(steps=1), device)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(device).train()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model
    ids = [x[:, :-1].to(device) for x in shape.batches()]
    turn = iter(range(10**9))

    def work() -> int:
        x = ids[next(turn) % 4]
        with autocast(device, dtype):
            loss = run(input_ids=x, labels=x).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return shape.rows * shape.context

    return work


def multi30k(device: torch.device, tokens: int) -> None:
    """transformer-base on Multi30k's real lengths, counting real tokens only."""
    with tempfile.TemporaryDirectory() as folder:
        files = tuple(str(ROOT / f"multi30k/train.{side}.gz") for side in ("en", "de"))
        corpus = Corpus(format="parallel", files=files)
        padded = DataConfig(task="translation", train=(corpus,), batch_tokens=tokens, max_length=128, cache_dir=folder)
        packed = padded.model_copy(update={"packed": True})
        words = TokenizerConfig(kind="bpe", vocab_size=8000)
        data = prepare(padded, words)
        vocabulary = len(data.tokenizers[0])
        config = preset("transformer-base", [f"vocab_size={vocabulary}", "max_positions=256"])
        settings = TrainConfig(steps=10**6, lr=1e-4, warmup=10, schedule="constant", label_smoothing=0.1)

        def batches(settings: DataConfig, pool: int) -> Iterator[Batch]:
            # A pool of one batch's worth of sentences is shuffled, padded batches: lengths play no part.
            source = prepare(settings, words).train
            for item in Loader(source, tokens=tokens, pool=pool, pinned=device.type == "cuda"):
                yield item.batches[0]

        def our_work(data: DataConfig, pool: int) -> Work:
            update = capture_steps(ours(config, data, settings, device)).update
            items = _ahead(batches(data, pool))
            step = iter(range(1, 10**9))

            def work() -> int:
                batch = next(items)
                update((batch,), next(step), Progress())
                return batch.tokens

            return work

        model = Peer(vocabulary, config).to(device).train()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for layer in (*model.transformer.encoder.layers, *model.transformer.decoder.layers):
            layer.compile(dynamic=True)  # block by block as ours: the whole model compiles for minutes
        model.score = torch.compile(model.score, dynamic=True)
        run, dtype = model, precision(settings, device)

        def peer_work(pool: int) -> Work:
            items = _ahead(batches(padded, pool))

            def work() -> int:
                batch = next(items).to(device)
                with autocast(device, dtype):
                    loss = run(batch["source"], batch["target"], batch["labels"], batch["source_lengths"])
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                adam.step()
                adam.zero_grad(set_to_none=True)
                return batch.tokens

            return work

        works = {
            "ours, packed": our_work(packed, 1 << 15),
            "nn.Transformer, shuffled": peer_work(max(1, tokens // 30)),
            "nn.Transformer, bucketed": peer_work(1 << 15),
        }
        found = rates(works, device, warm=AHEAD, steps=50)  # every shape was seen before the clock runs
        print(f"transformer-base, {count_parameters(build(config, 'meta')):,} parameters, {tokens:,} tokens a batch")
        for name, rate in found.items():
            ratio = f"{found['ours, packed'] / rate:.2f}x" if name.startswith("nn") else ""
            print(f"{name:26} {rate:12,.0f} real tokens/s   {ratio}")


def _ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches made beforehand, so that the loader's own speed plays no part (bench.data measures that)."""
    ready = [next(batches) for _ in range(AHEAD)]
    while True:
        yield from ready


def main() -> None:
    """Run one of the benches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=["gpt2", "multi30k", "shakespeare"])
    parser.add_argument("--tokens", type=int, default=16384, help="multi30k: padded tokens of a batch")
    parser.add_argument("--rows", type=int, default=32)
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
