"""What one more token costs a small model behind more and more tokens, with the cache and without (bench.decode)."""

import torch

from bench.timing import measure
from clearhead.config import ModelConfig
from clearhead.inference import enable_cuda_graphs
from clearhead.inference import replay as graphs
from clearhead.inference.cuda_graph import Choice
from clearhead.inference.sampling import Sampler
from clearhead.inference.step import Step
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
    """Print the table; on a GPU with a column for steps that are replayed."""
    network = build(CONFIG, device).eval()
    replays = enable_cuda_graphs(network)
    print(f"\ncost of one token: {CONFIG.decoder_layers} layers of width {CONFIG.dim}, one row, float32")
    print(f"{'context':>8} {'cached ms':>10} {'uncached ms':>12} {'times':>6}{' replayed ms' if replays else ''}")
    ones = torch.zeros(1, 1, dtype=torch.long, device=device)
    for context in CONTEXTS:
        ids = torch.randint(CONFIG.target_vocab, (1, context), device=device)
        with torch.inference_mode():
            step = Step(network, 1, context + 1)
            step.start(ids.tolist())

            def cached(step: Step = step, context: int = context) -> None:
                step.next(ones)
                step.rewind([context])

            def uncached(ids: torch.Tensor = ids) -> None:
                network.logits(network.decode(ids)[:, -1:])  # type: ignore[operator]

            (with_cache, _), (without, _) = measure(cached, device), measure(uncached, device)
            line = f"{context:>8} {1e3 * with_cache:>10.3f} {1e3 * without:>12.3f} {without / with_cache:>5.1f}x"
            if replays and (capture_steps := graphs.cuda_graphs_of(network)) is not None:
                replayed = graphs.ReplayStep(step, capture_steps, Choice(Sampler()))

                def again(replayed: graphs.ReplayStep = replayed, context: int = context) -> None:
                    replayed.replay()
                    replayed.max_length = context
                    replayed.recording.lengths.fill_(context)

                line += f" {1e3 * measure(again, device)[0]:>11.3f}"
        print(line, flush=True)
