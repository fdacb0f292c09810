"""Parameters, memory and FLOPs of a config, counted on torch's meta device without allocating weights."""

from dataclasses import dataclass

import torch
from torch import nn

from clearhead.config import ModelConfig
from clearhead.model.network import Network, build
from clearhead.ops.masks import Pattern, patterns

ADAM_BYTES = 16  # per parameter, in fp32: weight, gradient, and Adam's two moments


@dataclass(frozen=True)
class Cost:
    """Bytes of memory and FLOPs of a model at a context length; training memory leaves out activations."""

    parameters: int
    weight_bytes: int
    training_bytes: int
    cache_bytes: int
    flops_per_token: int


def model_cost(config: ModelConfig, context: int | None = None, dtype: torch.dtype = torch.float32) -> Cost:
    """Return the cost of a config, with weights and KV cache in `dtype`; `context` defaults to `max_positions`."""
    network = build(config, "meta")
    count = count_parameters(network)
    context = min(context or config.max_positions, config.max_positions)
    cache = cache_bytes(config, context, dtype)
    if config.family == "encoder-decoder":
        cache *= 2  # cross-attention caches a source of the same length
    return Cost(count, count * dtype.itemsize, count * ADAM_BYTES, cache, flops_per_token(network, context))


def cache_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of the self-attention KV cache for `tokens` tokens, over all decoder layers."""
    return 2 * config.decoder_layers * config.kv_heads * config.head_dim * tokens * dtype.itemsize


def count_parameters(network: nn.Module) -> int:
    """Return the number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in network.parameters())


def parameters_by_part(network: Network) -> dict[str, int]:
    """Return the number of parameters of each part; tied ones count for the part that comes first."""
    kinds = {".embedding.": "embedding", "heads.": "heads", ".cross_": "cross-attention", ".attention": "attention"}
    kinds[".feed_forward"] = "feed-forward"
    counts: dict[str, int] = {}
    for name, parameter in network.named_parameters():
        kind = next((kind for infix, kind in kinds.items() if infix in name), "final norm")
        stack = name.split(".")[0] if kind != "heads" else ""
        key = f"{stack} {kind}".strip()
        counts[key] = counts.get(key, 0) + parameter.numel()
    return counts


def flops_per_token(network: Network, context: int) -> int:
    """Return the FLOPs of one forward pass for the last token of a context; a multiply-add counts as two.

    Matmuls only: linear layers, logits, and attention over the keys that the pattern allows. For an encoder-decoder:
    one source token and one target token, each at the end of a full context.
    """
    config = network.config
    per_row = ("heads.pooler", "heads.next_sentence", "heads.classes")  # run once a row, not once a token
    weights = sum(
        module.weight.numel()
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(per_row)
    )
    keys = sum(
        visible_keys(pattern, context)
        for layers in (config.encoder_layers, config.decoder_layers)
        for pattern in patterns(config, layers)
    )
    if config.family == "encoder-decoder":
        keys += config.decoder_layers * context  # cross-attention
    return 2 * weights + 4 * config.heads * config.head_dim * keys


def visible_keys(pattern: Pattern, context: int) -> int:
    """Return how many keys the last of `context` tokens attends to."""
    position = context - 1
    match pattern.kind:
        case "window":
            return min(pattern.size, context)
        case "column":
            return position // pattern.size + 1
        case "block":
            return position % pattern.size + 1
        case "summary":
            blocks, rest = divmod(context, pattern.size)
            return blocks * pattern.summary + max(0, rest - (pattern.size - pattern.summary))
    return context
