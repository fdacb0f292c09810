"""How weights begin, as each published family does it.

xavier      2017: matrices uniform by fan-in and fan-out, embeddings normal with variance 1/width
truncated   BERT: normal with deviation 0.02, cut at two deviations
normal      GPT and Llama: normal with deviation 0.02
scaled      GPT-2: as normal, positions 0.01, and what writes into the residual stream smaller by √(2 · layers)

Biases begin at 0, norms at 1. Classes that are read off a pooler begin with deviation 1/√width: a pooler that was never
trained gives tiny numbers, and through tiny scores the layers below would learn nothing in the first steps.
"""

import math

from torch import Tensor, nn

from clearhead.config import ModelConfig

DEVIATION = 0.02
RESIDUAL = ("attention.output", "feed_forward.down")  # the projections that write into the residual stream
POOLED = "heads.classes.proj"  # reads the pooler where there is one


def init_weights(network: nn.Module, config: ModelConfig) -> None:
    """Draw every weight of the network anew, from torch's current random state."""
    layers = config.decoder_layers or config.encoder_layers
    drawn: set[Tensor] = set()
    for name, module in network.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if module.weight in drawn:  # tied: the embedding, which comes first, has the say
            continue
        drawn.add(module.weight)
        _draw(module, name, config, layers)


def _draw(module: nn.Linear | nn.Embedding, name: str, config: ModelConfig, layers: int) -> None:
    weight = module.weight
    if config.pooler and name == POOLED:
        nn.init.normal_(weight, std=config.dim**-0.5)
    elif config.init == "xavier" and isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(weight)
    elif config.init == "xavier":
        nn.init.normal_(weight, std=config.dim**-0.5)
    elif config.init == "truncated":
        nn.init.trunc_normal_(weight, std=DEVIATION, a=-2 * DEVIATION, b=2 * DEVIATION)
    elif config.init == "scaled" and name.endswith(RESIDUAL):
        nn.init.normal_(weight, std=DEVIATION / math.sqrt(2 * layers))
    elif config.init == "scaled" and name.endswith("embedding.positions"):
        nn.init.normal_(weight, std=DEVIATION / 2)
    else:
        nn.init.normal_(weight, std=DEVIATION)
