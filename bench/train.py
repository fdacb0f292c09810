"""Training speed, us and the peer in one run on the same shapes, and the share of the machine's matrix ceiling.

python -m bench.train gpt2           GPT-2 124M, 32 rows of 1,024 tokens, beside transformers (both compiled)
python -m bench.train multi30k       transformer-base on Multi30k's real lengths, beside torch.nn.Transformer; real
                                     tokens count; ours are packed, its batches padded, once shuffled, once bucketed
python -m bench.train shakespeare    4 layers of width 128, context 64, batch 12, beside transformers; for a CPU
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.timing import machine, matrix_ceiling
from clearhead.config import ModelConfig, preset
from clearhead.config.data import Corpus, DataConfig, TokenizerConfig
from clearhead.config.train import TrainConfig
from clearhead.data import Batch, Loader, prepare
from clearhead.model import build
from clearhead.model.measure import parameters
from clearhead.train.objective import Objective
from clearhead.train.optimiser import optimiser
from clearhead.train.parallel import Place, cast, precision, speed_up
from clearhead.train.recorded import recorded
from clearhead.train.step import Progress, Updater

Work = Callable[[], int]  # one step; gives its real tokens
AHEAD = 200  # batches of Multi30k made beforehand
ROOT = Path(os.environ.get("CLEARHEAD_DATA", "../shared/data"))


def ours(config: ModelConfig, data: DataConfig, settings: TrainConfig, device: torch.device) -> Updater:
    """Our updater, as `clearhead train` sets it up."""
    torch.manual_seed(0)
    network = build(config).to(device)
    objective = Objective(network, data, settings).train()
    speed_up(objective, settings, Place(device))
    adam = optimiser(network, settings)
    return Updater(objective, objective, adam, settings, Place(device), precision(settings, device))


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


def gpt(device: torch.device, layers: int, width: int, heads: int, context: int, rows: int, vocabulary: int) -> None:
    """A GPT on random tokens: ours, and transformers' eager and compiled."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = [f"decoder_layers={layers}", f"width={width}", f"heads={heads}", f"ff_width={4 * width}"]
    shape += [f"max_positions={context}", f"vocab_size={vocabulary}", "dropout=0.0", "attention_dropout=0.0"]
    config = preset("gpt2", shape)
    # As the peer: compiled as a whole where anything is.
    whole = "whole" if device.type == "cuda" else "off"
    settings = TrainConfig(steps=10**6, rate=1e-4, warmup=10, schedule="constant", compile=whole)
    data = DataConfig(task="language-model", longest=context, tokens=rows * context)
    updater = ours(config, data, settings, device)
    ids = [torch.randint(vocabulary, (rows, context + 1), device=device) for _ in range(4)]
    batches = [
        Batch({"ids": x[:, :-1].cpu().contiguous(), "labels": x[:, 1:].cpu().contiguous()}, rows * context) for x in ids
    ]  # as the loader gives them
    batches = [batch.pin() for batch in batches] if device.type == "cuda" else batches
    step = iter(range(1, 10**9))
    update = recorded(updater).update

    def our_step() -> int:
        number = next(step)
        update((batches[number % 4],), number, Progress())
        return rows * context

    theirs = GPT2Config(
        vocab_size=vocabulary, n_positions=context, n_embd=width, n_layer=layers, n_head=heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    dtype = precision(settings, device)

    def peer(compiled: bool) -> Work:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(theirs).to(device).train()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run = torch.compile(model) if compiled else model
        turn = iter(range(10**9))

        def work() -> int:
            x = ids[next(turn) % 4][:, :-1]
            with cast(device, dtype):
                loss = run(input_ids=x, labels=x).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad(set_to_none=True)
            return rows * context

        return work

    works: dict[str, Work] = {"ours": our_step, "transformers, compiled": peer(True)}
    if device.type == "cpu":
        works["transformers, eager"] = peer(False)
    # A CPU is shared and has good and bad minutes: many short rounds, so that each side has its part of both.
    often = {"warm": 5, "steps": 20} if device.type == "cuda" else {"warm": 20, "steps": 12, "rounds": 15}
    found = rates(works, device, **often)
    ceiling = matrix_ceiling(device, dtype)
    count = parameters(updater.objective.network)
    flops = 6 * count + 12 * layers * width * context
    print(
        f"{count:,} parameters, {rows} rows of {context:,} tokens, {dtype}, matrix ceiling {ceiling / 1e12:.2f} TFLOP/s"
    )
    for name, rate in found.items():
        ratio = f"{found['ours'] / rate:.2f}x" if name != "ours" else ""
        print(f"{name:26} {rate:12,.0f} tokens/s   {rate * flops / ceiling:6.1%} of the ceiling   {ratio}")


def multi30k(device: torch.device, tokens: int) -> None:
    """transformer-base on Multi30k's real lengths, counting real tokens only."""
    with tempfile.TemporaryDirectory() as folder:
        files = tuple(str(ROOT / f"multi30k/train.{side}.gz") for side in ("en", "de"))
        corpus = Corpus(format="parallel", files=files)
        padded = DataConfig(task="translation", train=(corpus,), tokens=tokens, longest=128, cache=folder)
        packed = padded.model_copy(update={"packed": True})
        words = TokenizerConfig(kind="bpe", size=8000)
        data = prepare(padded, words)
        vocabulary = len(data.tokenizers[0])
        config = preset("transformer-base", [f"vocab_size={vocabulary}", "max_positions=256"])
        settings = TrainConfig(steps=10**6, rate=1e-4, warmup=10, schedule="constant", smoothing=0.1)

        def batches(settings: DataConfig, pool: int) -> Iterator[Batch]:
            # A pool of one batch's worth of sentences is shuffled, padded batches: lengths play no part.
            source = prepare(settings, words).train
            for item in Loader(source, tokens=tokens, pool=pool, pinned=device.type == "cuda"):
                yield item.batches[0]

        def our_work(data: DataConfig, pool: int) -> Work:
            update = recorded(ours(config, data, settings, device)).update
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
                with cast(device, dtype):
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
        print(f"transformer-base, {parameters(build(config, 'meta')):,} parameters, {tokens:,} tokens a batch")
        for name, rate in found.items():
            ratio = f"{found['ours, packed'] / rate:.2f}x" if name.startswith("nn") else ""
            print(f"{name:26} {rate:12,.0f} real tokens/s   {ratio}")


def _ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches made beforehand, so that the loader's own speed plays no part (bench.data measures that)."""
    ready = [next(batches) for _ in range(AHEAD)]
    while True:
        yield from ready


class Peer(nn.Module):
    """torch.nn.Transformer with embeddings, sinusoids and one shared matrix: the same model by torch's own parts."""

    def __init__(self, vocabulary: int, config: ModelConfig):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.transformer = nn.Transformer(
            config.width, config.heads, config.encoder_layers, config.decoder_layers, config.ff_width,
            dropout=config.dropout, batch_first=True,
        )  # fmt: skip
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # as the paper, and as ours: attention itself drops nothing
        rates = torch.exp(torch.arange(0, config.width, 2) * (-torch.log(torch.tensor(10000.0)) / config.width))
        angles = torch.arange(config.max_positions)[:, None] * rates
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.dropout, self.scale = nn.Dropout(config.dropout), config.width**0.5

    def embed(self, ids: Tensor) -> Tensor:
        """Ids to vectors."""
        return self.dropout(self.embedding(ids) * self.scale + self.positions[: ids.shape[1]])

    def forward(self, source: Tensor, target: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        """The mean loss of a batch."""
        padding = torch.arange(source.shape[1], device=source.device) >= lengths[:, None]
        future = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=source.device, dtype=torch.bool)
        hidden = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=future, src_key_padding_mask=padding,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return self.score(hidden, labels)

    def score(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The loss of what the decoder gave."""
        scores = F.linear(hidden, self.embedding.weight)
        return F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, label_smoothing=0.1)


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
        gpt(device, 12, 768, 12, 1024, options.rows, 50304)
    elif options.bench == "shakespeare":
        gpt(torch.device("cpu"), 4, 128, 4, 64, 12, 65)
    else:
        multi30k(device, options.tokens)


if __name__ == "__main__":
    main()
