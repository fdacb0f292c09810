"""The five lines that `print(model)` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from clearhead.config.dtypes import ALIASES
from clearhead.config.model import supported_commands
from clearhead.model.cost import model_cost
from clearhead.ops.linear.quantized_tensor import quantized_kind

if TYPE_CHECKING:
    from clearhead.predict.model import Model


def summary(model: Model) -> str:
    """Name and family; shape; parameters, dtype and device; tokenizer; methods."""
    config, task = model.config, model.extra.get("task")
    stacks = (("encoder", config.encoder_layers), ("decoder", config.decoder_layers))
    layers = " + ".join(f"{count} {name}" for name, count in stacks if count)
    heads = f"{config.heads} heads" + (f" ({config.kv_heads} key-value)" if config.kv_heads != config.heads else "")
    vocab = " / ".join(f"{size:,}" for size in dict.fromkeys((config.source_vocab, config.target_vocab)))
    weights = next(model.network.parameters())
    dtype = str(model.dtype or quantized_kind(model.network) or weights.dtype).removeprefix("torch.")
    parameters = model_cost(config, dtype=torch.float32).parameters
    kinds = [f"{type(each.engine.model).__name__} of {len(each):,} tokens" for each in model.own_tokenizers]
    return "\n".join(
        [
            f"{model.label}: {config.family}" + (f" for {task}" if task else ""),
            f"{layers} layers, dim {config.dim}, {heads}, vocabulary {vocab}",
            f"{parameters:,} parameters, {ALIASES.get(dtype, dtype)} on {weights.device}",
            f"tokenizer: {' / '.join(kinds) or 'none, ids only'}",
            f"can {', '.join([*supported_commands(config), 'inspect', 'export'])}",
        ]
    )
