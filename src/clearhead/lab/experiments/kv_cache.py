"""The KV cache: time of a new token with and without it, by length; what is stored."""

import time

import torch

from clearhead.config import ModelConfig
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.model import build
from clearhead.model.cache import KVCache

LAYERS, DIM = 4, 256


def measure(run: Run) -> Results:
    """Cells are "with cache|tokens so far"; each repetition counts as a seed."""
    config = ModelConfig(
        family="decoder",
        decoder_layers=LAYERS,
        dim=DIM,
        heads=4,
        vocab_size=1000,
        position="rotary",
        max_positions=2048,
    )

    def part(length: int) -> Results:
        network = build(config).to(run.device).eval()
        ids = torch.randint(1000, (1, length), device=run.device)

        def seconds(cached: bool) -> float:
            cache = KVCache(config, 1, length + 8)
            network(ids[:, :-1], cache=cache)
            start = time.perf_counter()
            network(ids[:, -1:], cache=cache) if cached else network(ids)
            if ids.is_cuda:
                torch.cuda.synchronize()
            return 1000 * (time.perf_counter() - start)

        with torch.no_grad():
            times = {name: [seconds(cached) for _ in range(len(run.seeds) + 1)][1:] for name, cached in
                     (("with cache", True), ("without", False))}  # fmt: skip
        return {f"{name}|{length}": {"milliseconds": values} for name, values in times.items()}

    def stored() -> Results:
        network, cache = build(config), KVCache(config, 1, 10)
        with torch.no_grad():
            network(torch.zeros(1, 10, dtype=torch.long), cache=cache)
        numbers = sum(tensor.numel() for layer in cache.layers for tensor in layer.read())
        return {"cache": {"numbers per token": [numbers / 10] * len(run.seeds)}}

    results: Results = {}
    for length in (64, 256, 1024):
        results |= run.part(f"{length} tokens", lambda length=length: part(length))  # type: ignore[misc]
    results |= run.part("stored", stored)
    return results


EXPERIMENT = Experiment(
    name="kv-cache",
    title=Text("The KV cache", "KV 缓存"),
    claim=Text("Caching what was computed for earlier tokens makes each new token far cheaper; cached are keys and values.",
               "缓存前文算过的内容，生成每个新 token 就便宜得多；缓存的是键和值。"),
    checklist=(111, 132, 133),
    predictions=(
        Prediction(Text("At 1,024 tokens, a step without cache takes several times as long", "1024 个 token 时，没有缓存的一步要慢几倍"),
                   "milliseconds", "without|1024", "with cache|1024", "higher", 3.0, relative=True),
        Prediction(Text("The cache holds a key and a value per layer, 2 × 4 × 256 numbers a token", "缓存每层存一个键和一个值：每个 token 2 × 4 × 256 个数"),
                   "numbers per token", "cache", 2.0 * LAYERS * DIM, "same", 1, exact=True),
    ),
    measure=measure,
    figures=(Figure("milliseconds", Text("Time of one new token", "生成一个新 token 的时间"), Text("tokens so far", "已有 token 数"), log_x=True, log_y=True),),
    note=Text("A model of 4 layers; on a GPU its steps are bound by kernel launches, not by arithmetic, and the cache saves nothing at these lengths.",
              "4 层的模型；在 GPU 上，它的每一步受内核启动时间而不是运算量限制，在这些长度上缓存省不下时间。"),
)  # fmt: skip
