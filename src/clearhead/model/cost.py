"""What a model costs, without building it for real: parameters, memory, floating-point operations.

Everything is read off the network on torch's meta device, which has shapes and no numbers.
"""

from dataclasses import dataclass

import torch
from torch import nn

from clearhead.config import ModelConfig
from clearhead.model.network import Network, build
from clearhead.ops.masks import Pattern, patterns

ADAM_BYTES = 16  # fp32 for each parameter: weight, gradient, and Adam's two moments


@dataclass(frozen=True)
class Cost:
    """The cost of a model at a context length. Memory is in bytes; training memory leaves out activations."""

    parameters: int
    weight_bytes: int
    training_bytes: int
    cache_bytes: int
    flops_per_token: int


def model_cost(config: ModelConfig, context: int | None = None, dtype: torch.dtype = torch.float32) -> Cost:
    """The cost of a config, with weights and cache in `dtype`; the context is `max_positions` unless given."""
    network = build(config, "meta")
    count = count_parameters(network)
    context = min(context or config.max_positions, config.max_positions)
    size = dtype.itemsize
    cache = cache_bytes(config, context, dtype)
    if config.family == "encoder-decoder":
        cache *= 2  # the keys and values of a source as long as the target
    return Cost(count, count * size, count * ADAM_BYTES, cache, flops_per_token(network, context))


def cache_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype = torch.float32) -> int:
    """Memory of the keys and values of so many tokens, in all layers of a decoder."""
    return 2 * config.decoder_layers * config.kv_heads * config.head_dim * tokens * dtype.itemsize


def count_parameters(network: nn.Module) -> int:
    """The number of parameters; what is shared counts once."""
    return sum(parameter.numel() for parameter in network.parameters())


def parameters_by_part(network: Network) -> dict[str, int]:
    """The parameters by what they are for, each counted once: what is tied belongs to the first that uses it."""
    kinds = {".embedding.": "embedding", "heads.": "heads", ".cross_": "cross-attention", ".attention": "attention"}
    kinds[".feed_forward"] = "feed-forward"
    found: dict[str, int] = {}
    for name, parameter in network.named_parameters():
        kind = next((kind for mark, kind in kinds.items() if mark in name), "closing norm")
        stack = name.split(".")[0] if kind != "heads" else ""
        key = f"{stack} {kind}".strip()
        found[key] = found.get(key, 0) + parameter.numel()
    return found


def flops_per_token(network: Network, context: int) -> int:
    """Floating-point operations of one forward pass for a token at the end of the context; a multiply-add is two.

    Matrix products alone: the linear layers, the word scores, and attention over the keys that the pattern lets a
    query see. Of an encoder-decoder: one source token and one target token, both contexts full.
    """
    config = network.config
    # One vector a row goes through the pooler and what reads it; over a context that is next to nothing.
    per_row = ("heads.pooler", "heads.next_sentence", "heads.classes")
    matrices = sum(
        module.weight.numel()
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(per_row)
    )
    seen = sum(
        keys_seen(pattern, context)
        for layers in (config.encoder_layers, config.decoder_layers)
        for pattern in patterns(config, layers)
    )
    if config.family == "encoder-decoder":
        seen += config.decoder_layers * context  # cross-attention
    return 2 * matrices + 4 * config.heads * config.head_dim * seen


def keys_seen(pattern: Pattern, context: int) -> int:
    """How many keys the last of `context` tokens sees."""
    position = context - 1
    match pattern.kind:
        case "window":
            return min(pattern.size, context)
        case "column":
            return position // pattern.size + 1
        case "block":
            return position % pattern.size + 1
        case "summary":
            full, rest = divmod(context, pattern.size)
            return full * pattern.summary + max(0, rest - (pattern.size - pattern.summary))
    return context
