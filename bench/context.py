"""Decode step time by context length, with and without a KV cache; printed by bench.decode."""

import torch

from bench.timing import measure
from clearhead.config import ModelConfig
from clearhead.inference import cuda_graph_replay as graphs
from clearhead.inference import enable_cuda_graphs
from clearhead.inference.cuda_graph import GraphSampling
from clearhead.inference.model_runner import ModelRunner
from clearhead.inference.sampling import Sampler
from clearhead.model import build

CONTEXTS = [128, 256, 512, 1024, 2048, 4096]
CONFIG = ModelConfig(
    family="decoder",
    decoder_layers=4,
    dim=256,
    heads=4,
    kv_heads=1,
    activation="swiglu",
    norm="rms",
    bias=False,
    position="rotary",
    vocab_size=4000,
    max_positions=8192,
)


def by_context(device: torch.device) -> None:
    """Print the table; on a GPU with a column for CUDA graph replay."""
    network = build(CONFIG, device).eval()
    has_graphs = enable_cuda_graphs(network)
    print(f"\ntime per token: {CONFIG.decoder_layers} layers, dim {CONFIG.dim}, batch 1, float32")
    print(f"{'context':>8} {'cached ms':>10} {'uncached ms':>12} {'ratio':>6}{' replayed ms' if has_graphs else ''}")
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    for context in CONTEXTS:
        ids = torch.randint(CONFIG.target_vocab, (1, context), device=device)
        with torch.inference_mode():
            step = ModelRunner(network, 1, context + 1)
            step.prefill(ids.tolist())

            def cached(step: ModelRunner = step, context: int = context) -> None:
                step.decode_step(token)
                step.rewind([context])

            def uncached(ids: torch.Tensor = ids) -> None:
                network.logits(network.decode(ids)[:, -1:])  # type: ignore[operator]

            (cached_seconds, _), (uncached_seconds, _) = measure(cached, device), measure(uncached, device)
            line = f"{context:>8} {1e3 * cached_seconds:>10.3f} {1e3 * uncached_seconds:>12.3f} "
            line += f"{uncached_seconds / cached_seconds:>5.1f}x"
            if has_graphs and (graph_cache := graphs.cuda_graphs_of(network)) is not None:
                replayed = graphs.ReplayRunner(step, graph_cache, GraphSampling(Sampler()))

                def replay(replayed: graphs.ReplayRunner = replayed, context: int = context) -> None:
                    replayed.replay()
                    replayed.max_length = context
                    replayed.graph.lengths.fill_(context)

                line += f" {1e3 * measure(replay, device)[0]:>11.3f}"
        print(line, flush=True)
