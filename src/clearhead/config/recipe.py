"""Recipes: model, tokenizer, data and training of one run, as a commented YAML file that doubles as the manual."""

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from clearhead.config.data import DataConfig, TokenizerConfig
from clearhead.config.load import apply, preset_data, read_yaml
from clearhead.config.model import ModelConfig
from clearhead.config.settings import Settings, nearest
from clearhead.config.train import TrainConfig
from clearhead.errors import ConfigError
from clearhead.files import read_text

RECIPES = resources.files("clearhead.config") / "recipes"
VOCABULARY = ("vocab_size", "source_vocab_size", "target_vocab_size")
OVERRIDABLE = ("dropout", "attention_dropout", "pooling")  # of a model to go on from
SMALLEST = {"family": "encoder", "encoder_layers": 1, "dim": 2, "heads": 1, "vocab_size": 1}  # to check these with
FROM_DATA = {*VOCABULARY, "outputs", "labels", "pooler"}
# The family and the outputs that each task needs.
NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "translation": (("encoder-decoder",), "lm"),
    "language-model": (("decoder",), "lm"),
    "masked-language-model": (("encoder",), "lm"),
    "classification": (("encoder", "decoder"), "classes"),
    "regression": (("encoder", "decoder"), "classes"),
    "tagging": (("encoder", "decoder"), "tags"),
    "answering": (("encoder", "decoder"), "span"),
    "similarity": (("encoder", "decoder"), ""),
}
# What validation measures beside the loss, where it is not the accuracy alone
MEASURED: dict[str, tuple[str, ...]] = {
    "translation": ("accuracy", "bleu", "chrf", "exact"),
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "tagging": ("accuracy", "f1"),
    "answering": ("accuracy", "exact", "f1"),
    "similarity": ("pearson", "spearman"),
}


class Recipe(Settings):
    """Everything that decides a run. The vocabulary and the labels of the model come from the data."""

    model: dict[
        str, Any
    ]  # `preset` (or `folder`, the name or folder of a model to go on from) and what differs from it
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    data: DataConfig
    train: TrainConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "init_from" in self.model:
            if set(self.model) - {"init_from", *OVERRIDABLE}:
                keys = ", ".join(OVERRIDABLE)
                raise ValueError(f"model: a folder has its architecture already; only {keys} can be changed beside it")
            changes = {key: value for key, value in self.model.items() if key in OVERRIDABLE}
            ModelConfig.build(SMALLEST | changes, where="model")
        else:
            for key in FROM_DATA & self.model.keys():
                raise ValueError(f"model.{key}: comes from the tokenizer, the task and the data; leave it out")
            self.architecture((8,) if self.tokenizer.joint else (8, 8))
        task, train = self.data.task, self.train
        if task != "translation" and train.scheduled_sampling is not None:
            raise ValueError(f"train.scheduled_sampling: scheduled sampling is for translation; the task is {task}")
        if train.class_weights is not None and task not in ("classification", "tagging"):
            raise ValueError(f"train.class_weights: for classification and tagging; the task is {task}")
        measured = ["loss", *MEASURED.get(task, ("accuracy",))]
        if task == "translation" and not train.eval_samples:
            measured = ["loss", "accuracy"]
        if task == "similarity" and self.data.contrastive:
            measured = ["loss", "accuracy"]
        if train.metric not in measured:
            raise ValueError(f"train.metric: {train.metric} is not measured here; use {' or '.join(measured)}")
        if (train.metric != "loss" or train.patience) and not (self.data.valid or self.data.held_out):
            key = "patience" if train.patience else "metric"
            raise ValueError(f"train.{key}: there is no validation data; add data.valid or data.held_out")
        return self

    def architecture(self, sizes: tuple[int, ...], labels: int = 1) -> ModelConfig:
        """The model for a vocabulary of so many tokens (or a source's and a target's) and so many labels."""
        settings = {key: value for key, value in self._model_data().items() if key not in VOCABULARY}
        if len(sizes) == 1:
            settings["vocab_size"] = sizes[0]
        else:
            settings |= {"source_vocab_size": sizes[0], "target_vocab_size": sizes[-1]}
            if settings.get("tie") == "all":
                settings["tie"] = "output"  # two vocabularies have no matrix in common
        settings |= outputs(self.data, labels, settings)
        config = ModelConfig.build(settings, where="model")
        self.check_model(config)
        return config

    def check_model(self, config: ModelConfig) -> None:
        """Refuse a model that cannot do the task, or cannot read texts as long as the data's."""
        families = NEEDS[self.data.task][0]
        if config.family not in families:
            raise ConfigError(f"model.family: {config.family}, but {self.data.task} needs {' or '.join(families)}")
        max_length = self.data.max_length
        if max_length > config.max_positions:
            change = "lower it" if "init_from" in self.model else "lower it, or raise model.max_positions"
            raise ConfigError(
                f"data.max_length: {max_length} tokens, but the model has {config.max_positions} positions; {change}"
            )

    def _model_data(self) -> dict[str, Any]:
        data = dict(self.model)
        base = data.pop("preset", None)
        return (preset_data(str(base)) if base is not None else {}) | data


def outputs(data: DataConfig, labels: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What the model has to give for a task, as settings of the model."""
    needed = NEEDS[data.task][1]
    found: dict[str, Any] = {"outputs": [needed] if needed else [], "labels": 0}
    if data.task == "masked-language-model" and data.next_sentence:
        found["outputs"] = ["lm", "next-sentence"]
    if needed in ("classes", "tags"):
        found["labels"] = 1 if data.task == "regression" else labels
    if settings.get("family") == "encoder":
        found["pooler"] = "next-sentence" in found["outputs"] or needed == "classes"
    return found


def recipe_names() -> list[str]:
    """The names of the recipes that come with the package."""
    if not RECIPES.is_dir():
        return []
    return sorted(Path(entry.name).stem for entry in RECIPES.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """The YAML of a recipe by name, or of a file."""
    if name in recipe_names():
        return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    if name.endswith((".yaml", ".yml")) or "/" in name or Path(name).is_file():
        return read_text(Path(name))
    raise ConfigError(f"recipe: no recipe {name!r}{nearest(name, recipe_names())}")


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe `name`, or a YAML file with one, changed by `group.key=value` overrides."""
    return Recipe.build(apply(read_yaml(recipe_text(name), name), overrides), where=name)


def dump_recipe(recipe: Recipe) -> str:
    """A recipe as resolved, with every default written out; reading it gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
