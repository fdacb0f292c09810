"""Initial weights: fresh, or those of a model folder with fresh heads for a new task; class weights of the loss."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.checkpoint import LoadedModel, load_model
from clearhead.config.data import TokenizerConfig
from clearhead.config.model import ModelConfig
from clearhead.config.recipe import OVERRIDABLE, Recipe, task_outputs
from clearhead.config.settings import nearest
from clearhead.data import IGNORED, Data
from clearhead.data.random import hash_ints
from clearhead.errors import UserError
from clearhead.model import Network, build
from clearhead.ops.linear.quantized_tensor import dequantize_network
from clearhead.predict.find import find_model
from clearhead.text import Tokenizer

INHERITED = ("chat_template", "sampling", "eos_ids")  # of a decoder that goes on as one
LABEL_HEADS = ("heads.classes.", "heads.tags.", "heads.span.")


def load_initial_model(recipe: Recipe) -> LoadedModel | None:
    """Load the model folder of `model.init_from`, dequantized; None to train from scratch."""
    if "init_from" not in recipe.model:
        return None
    initial = load_model(find_model(str(recipe.model["init_from"])))
    dequantize_network(initial.network)
    return initial


def fit_to_initial_model(recipe: Recipe, initial: LoadedModel | None) -> Recipe:
    """Lower defaults to what the initial model has positions for; raise if it does not fit the task or the data."""
    if initial is None:
        return recipe
    recipe = recipe.fit(initial.config)
    recipe.check_model(initial.config)
    return recipe


def tokenizers_for(recipe: Recipe, initial: LoadedModel | None) -> TokenizerConfig | tuple[Tokenizer, ...]:
    """Return the tokenizers of the initial model, or the settings to train new ones."""
    if initial is None:
        return recipe.tokenizer
    if not initial.tokenizers:
        raise UserError(
            f"model.init_from: {find_model(str(recipe.model['init_from']))} has no tokenizer.json; "
            "training from a model needs its tokenizer"
        )
    return initial.tokenizers


def init_network(recipe: Recipe, data: Data, initial: LoadedModel | None) -> Network:
    """Return a fresh network with the weights of the initial model where names and shapes match.

    Heads for labels are fresh unless the task and its labels are the same.
    """
    torch.manual_seed(int(hash_ints(recipe.train.seed, 0)) >> 1)
    labels = max(1, len(data.labels))
    if initial is None:
        return build(recipe.architecture(tuple(len(tokenizer) for tokenizer in data.tokenizers), labels))
    overrides = {key: recipe.model[key] for key in OVERRIDABLE if key in recipe.model}
    settings = initial.config.model_dump() | overrides
    network = build(ModelConfig.build(settings | task_outputs(recipe.data, labels, settings), where="model"))
    network.load_state_dict(pretrained_weights(recipe, data, initial, network), strict=False)
    return network


def pretrained_weights(recipe: Recipe, data: Data, initial: LoadedModel, network: Network) -> dict[str, Tensor]:
    """Return the weights of the initial model that a network starts from; all others are fresh."""
    own, pretrained = network.state_dict(), initial.network.state_dict()
    matching = {name: x for name, x in pretrained.items() if name in own and own[name].shape == x.shape}
    if (initial.extra.get("task"), initial.extra.get("labels")) != (recipe.data.task, list(data.labels)):
        matching = {name: x for name, x in matching.items() if not name.startswith(LABEL_HEADS)}
    return matching


def inherited(recipe: Recipe, initial: LoadedModel | None) -> dict[str, Any]:
    """Return what config.json of a fine-tuned decoder keeps of its initial model: its chat template, for one."""
    if initial is None or recipe.data.task != "language-model":
        return {}
    return {key: initial.extra[key] for key in INHERITED if key in initial.extra}


def class_weights(recipe: Recipe, data: Data) -> Tensor | None:
    """Return the loss weight of each class (C,): as given, or inversely proportional to class frequency."""
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
