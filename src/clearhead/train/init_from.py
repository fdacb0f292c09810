"""What training starts from: fresh weights, or those of a model folder with fresh heads for a new task."""

import numpy as np
import torch
from torch import Tensor

from clearhead.checkpoint import load_model
from clearhead.config.data import TokenizerConfig
from clearhead.config.model import ModelConfig
from clearhead.config.recipe import OVERRIDABLE, Recipe, outputs
from clearhead.config.settings import nearest
from clearhead.data import IGNORED, Data
from clearhead.data.random import hash_ints
from clearhead.errors import UserError
from clearhead.model import Network, build
from clearhead.predict.find import find_model
from clearhead.text import Tokenizer

LABELED = ("heads.classes.", "heads.tags.", "heads.span.")


def tokenizers_for(recipe: Recipe) -> TokenizerConfig | tuple[Tokenizer, ...]:
    """Those of the model that training starts from, or how to make them."""
    if "init_from" not in recipe.model:
        return recipe.tokenizer
    folder = find_model(str(recipe.model["init_from"]))
    found = load_model(folder, verify=False).tokenizers
    if not found:
        raise UserError(f"model.init_from: {folder} has no tokenizer.json; a model to go on from needs its tokenizer")
    return found


def init_network(recipe: Recipe, data: Data) -> Network:
    """A fresh network, or the one of a model folder with fresh heads for what it did not give before."""
    torch.manual_seed(int(hash_ints(recipe.train.seed, 0)) >> 1)
    if "init_from" not in recipe.model:
        return build(recipe.architecture(tuple(len(each) for each in data.tokenizers), max(1, len(data.labels))))
    loaded = load_model(find_model(str(recipe.model["init_from"])))
    changes = {key: recipe.model[key] for key in OVERRIDABLE if key in recipe.model}
    recipe.check_model(loaded.config)
    settings = loaded.config.model_dump() | changes
    config = ModelConfig.build(settings | outputs(recipe.data, max(1, len(data.labels)), settings), where="model")
    network = build(config)
    own = network.state_dict()
    known = {name: x for name, x in loaded.network.state_dict().items() if name in own and own[name].shape == x.shape}
    if (loaded.extra.get("task"), loaded.extra.get("labels")) != (recipe.data.task, list(data.labels)):
        known = {name: x for name, x in known.items() if not name.startswith(LABELED)}  # other labels, a new head
    network.load_state_dict(known, strict=False)
    return network


def class_weights(recipe: Recipe, data: Data) -> Tensor | None:
    """What a mistake weighs, for each label (C,): as given, or so that all labels weigh the same in total."""
    given = recipe.train.class_weights
    if given is None:
        return None
    if given == "balanced":
        field = "labels" if recipe.data.task == "tagging" else "label"
        counts = np.zeros(len(data.labels))
        for store in data.train.stores:
            values = np.asarray(store.fields[field][0])
            counts += np.bincount(values[values != IGNORED], minlength=len(counts))
        weights = counts.sum() / np.maximum(counts, 1) / len(counts)
    else:
        for name in given:
            if name not in data.labels:
                raise UserError(f"train.class_weights: no label {name!r}{nearest(name, list(data.labels))}")
        weights = np.array([given.get(name, 1.0) for name in data.labels])
    return torch.tensor(weights, dtype=torch.float32)
