"""Weight initialization, one scheme for each published family.   D model dim

xavier      2017 Transformer: linear layers Xavier-uniform, embeddings normal with standard deviation 1/√D
truncated   BERT: normal with standard deviation 0.02, truncated at two standard deviations
normal      GPT and Llama: normal with standard deviation 0.02
scaled      GPT-2: as normal, with position embeddings at 0.01 and residual projections divided by √(2 · layers)

Biases start at 0, norms at 1. A classifier on top of a pooler starts at 1/√D: an untrained pooler has tiny outputs, and
with small weights on top almost no gradient would reach the layers below in the first steps.
"""

import math

from torch import Tensor, nn

from clearhead.config import ModelConfig

STD = 0.02
RESIDUAL_PROJECTIONS = ("attention.output", "feed_forward.down")
CLASSIFIER = "heads.classes.proj"


def init_weights(network: nn.Module, config: ModelConfig) -> None:
    """Initialize every weight of the network in place, from torch's random state."""
    layers = config.decoder_layers or config.encoder_layers
    done: set[Tensor] = set()
    for name, module in network.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if module.weight in done:  # tied: initialized as the embedding, which comes first
            continue
        done.add(module.weight)
        _init_weight(module, name, config, layers)


def _init_weight(module: nn.Linear | nn.Embedding, name: str, config: ModelConfig, layers: int) -> None:
    weight = module.weight
    if config.pooler and name == CLASSIFIER:
        nn.init.normal_(weight, std=config.dim**-0.5)
    elif config.init == "xavier" and isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(weight)
    elif config.init == "xavier":
        nn.init.normal_(weight, std=config.dim**-0.5)
    elif config.init == "truncated":
        nn.init.trunc_normal_(weight, std=STD, a=-2 * STD, b=2 * STD)
    elif config.init == "scaled" and name.endswith(RESIDUAL_PROJECTIONS):
        nn.init.normal_(weight, std=STD / math.sqrt(2 * layers))
    elif config.init == "scaled" and name.endswith("embedding.positions"):
        nn.init.normal_(weight, std=STD / 2)
    else:
        nn.init.normal_(weight, std=STD)
