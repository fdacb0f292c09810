"""What training starts from: fresh weights, or those of a model folder with fresh heads for a new task."""

from pathlib import Path

import torch

from clearhead.checkpoint import load_model
from clearhead.config.data import TokenizerConfig
from clearhead.config.model import ModelConfig
from clearhead.config.recipe import Recipe, outputs
from clearhead.data import Data
from clearhead.data.chance import mix
from clearhead.model import Network, build
from clearhead.text import Tokenizer


def tokenizers_for(recipe: Recipe) -> TokenizerConfig | tuple[Tokenizer, ...]:
    """Those of the model that training starts from, or how to make them."""
    if "folder" not in recipe.model:
        return recipe.tokenizer
    return load_model(Path(str(recipe.model["folder"])), verify=False).tokenizers


def start_network(recipe: Recipe, data: Data) -> Network:
    """A fresh network, or the one of a model folder with fresh heads for what it did not give before."""
    torch.manual_seed(int(mix(recipe.train.seed, 0)) >> 1)
    if "folder" not in recipe.model:
        return build(recipe.architecture(tuple(len(each) for each in data.tokenizers), max(1, len(data.labels))))
    loaded = load_model(Path(str(recipe.model["folder"])))
    changes = {key: recipe.model[key] for key in ("dropout", "attention_dropout") if key in recipe.model}
    recipe.check_model(loaded.config)
    settings = loaded.config.model_dump() | changes
    config = ModelConfig.build(settings | outputs(recipe.data, max(1, len(data.labels)), settings), where="model")
    network = build(config)
    own = network.state_dict()
    known = {name: x for name, x in loaded.network.state_dict().items() if name in own and own[name].shape == x.shape}
    network.load_state_dict(known, strict=False)
    return network
