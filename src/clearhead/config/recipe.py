"""Recipes: one commented YAML file with the model, tokenizer, data and training settings of a run."""

import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from clearhead.config.data import MIN_LENGTH, DataConfig, TokenizerConfig, is_data_file
from clearhead.config.load import apply_overrides, preset_data, read_yaml
from clearhead.config.model import ModelConfig
from clearhead.config.settings import Settings, nearest
from clearhead.config.train import TrainConfig
from clearhead.errors import ConfigError
from clearhead.files import read_text

RECIPES = resources.files("clearhead.config") / "recipes"
VOCAB_KEYS = ("vocab_size", "source_vocab_size", "target_vocab_size")
OVERRIDABLE = ("dropout", "attention_dropout", "pooling")  # model settings allowed next to model.init_from
MINIMAL_MODEL = {
    "family": "encoder",
    "encoder_layers": 1,
    "dim": 2,
    "heads": 1,
    "vocab_size": 1,
}  # validates OVERRIDABLE
DERIVED_KEYS = {*VOCAB_KEYS, "outputs", "labels", "pooler"}  # model settings that follow from task and data
# Task → allowed families and the output head
TASK_REQUIREMENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "translation": (("encoder-decoder",), "lm"),
    "language-model": (("decoder",), "lm"),
    "masked-language-model": (("encoder",), "lm"),
    "classification": (("encoder", "decoder"), "classes"),
    "regression": (("encoder", "decoder"), "classes"),
    "tagging": (("encoder", "decoder"), "tags"),
    "answering": (("encoder", "decoder"), "span"),
    "similarity": (("encoder", "decoder"), ""),
}
# Task → validation metrics besides the loss; default: accuracy
TASK_METRICS: dict[str, tuple[str, ...]] = {
    "translation": ("accuracy", "bleu", "chrf", "exact"),
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "tagging": ("accuracy", "f1"),
    "answering": ("accuracy", "exact", "f1"),
    "similarity": ("pearson", "spearman"),
}


class Recipe(Settings):
    """All settings of a run. Vocabulary size and labels of the model come from the data."""

    # `preset` and the settings to change, or `init_from` (a model name, model folder or run folder) to fine-tune
    model: dict[str, Any]
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    data: DataConfig
    train: TrainConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        fitted = self
        if "init_from" in self.model:
            if set(self.model) - {"init_from", *OVERRIDABLE}:
                keys = ", ".join(OVERRIDABLE)
                raise ValueError(f"model: init_from fixes the architecture; besides it, set only {keys}")
            changes = {key: value for key, value in self.model.items() if key in OVERRIDABLE}
            ModelConfig.build(MINIMAL_MODEL | changes, where="model")
        else:
            for key in DERIVED_KEYS & self.model.keys():
                raise ValueError(f"model.{key}: is derived from the tokenizer, the task and the data; remove it")
            config = self._build_model((8,) if self.tokenizer.joint else (8, 8), 1)
            fitted = self.fit(config)
            fitted.check_model(config)
            if self.train.lora is not None:
                raise ValueError("train.lora: updates the layers of a trained model; name one as model.init_from")
        task, train = self.data.task, self.train
        if task != "translation" and train.scheduled_sampling is not None:
            raise ValueError(
                f"train.scheduled_sampling: scheduled sampling is for translation; the task is {task}, so remove it"
            )
        if train.class_weights is not None and task not in ("classification", "tagging"):
            raise ValueError(f"train.class_weights: for classification and tagging; the task is {task}, so remove it")
        metrics = ["loss", *TASK_METRICS.get(task, ("accuracy",))]
        if task == "translation" and not train.eval_samples:
            metrics = ["loss", "accuracy"]
        if task == "similarity" and self.data.contrastive:
            metrics = ["loss", "accuracy"]
        if train.metric not in metrics:
            raise ValueError(f"train.metric: {train.metric} is not available here; use {' or '.join(metrics)}")
        if (train.metric != "loss" or train.patience) and not (self.data.valid or self.data.held_out):
            key = "patience" if train.patience else "metric"
            raise ValueError(f"train.{key}: there is no validation data; add data.valid or data.held_out")
        return fitted

    def fit(self, config: ModelConfig) -> Self:
        """Return the recipe with data settings that were not given lowered to what the model has positions for."""
        data, given, changes = self.data, self.data.model_fields_set, dict[str, int]()
        if "max_length" not in given and data.max_length > config.max_positions >= MIN_LENGTH:
            changes["max_length"] = config.max_positions
        max_length = changes.get("max_length", data.max_length)
        if data.task == "answering" and "stride" not in given and data.stride > max_length // 2:
            changes["stride"] = max_length // 4
        return self.model_copy(update={"data": data.model_copy(update=changes)}) if changes else self

    def architecture(self, sizes: tuple[int, ...], labels: int = 1) -> ModelConfig:
        """Return the model config for one shared or two vocabulary sizes and a number of labels."""
        config = self._build_model(sizes, labels)
        self.check_model(config)
        return config

    def _build_model(self, sizes: tuple[int, ...], labels: int) -> ModelConfig:
        settings = {key: value for key, value in self._model_data().items() if key not in VOCAB_KEYS}
        if len(sizes) == 1:
            settings["vocab_size"] = sizes[0]
        else:
            settings |= {"source_vocab_size": sizes[0], "target_vocab_size": sizes[-1]}
            if settings.get("tie") == "all":
                settings["tie"] = "output"  # separate vocabularies cannot share a matrix
        settings |= task_outputs(self.data, labels, settings)
        return ModelConfig.build(settings, where="model")

    def check_model(self, config: ModelConfig) -> None:
        """Raise if the model does not fit the task or `data.max_length`."""
        families = TASK_REQUIREMENTS[self.data.task][0]
        if config.family not in families:
            raise ConfigError(
                f"model.family: {config.family}, but {self.data.task} needs {' or '.join(families)}; change one of them"
            )
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


def task_outputs(data: DataConfig, labels: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the output settings of a model for a task."""
    output = TASK_REQUIREMENTS[data.task][1]
    result: dict[str, Any] = {"outputs": [output] if output else [], "labels": 0}
    if data.task == "masked-language-model" and data.next_sentence:
        result["outputs"] = ["lm", "next-sentence"]
    if output in ("classes", "tags"):
        result["labels"] = 1 if data.task == "regression" else labels
    if settings.get("family") == "encoder":
        result["pooler"] = "next-sentence" in result["outputs"] or output == "classes"
    return result


def recipe_names() -> list[str]:
    """List the recipes that come with the package."""
    if not RECIPES.is_dir():
        return []
    return sorted(Path(entry.name).stem for entry in RECIPES.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """Return the YAML text of a recipe by name or path."""
    if name in recipe_names():
        return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    if is_data_file(name):
        raise ConfigError(f"{name} is data, not a recipe; write a recipe for it with: clearhead new {name}")
    if name.endswith((".yaml", ".yml")) or "/" in name or os.path.isfile(name):  # Path.is_file raises for long names
        return read_text(Path(name))
    raise ConfigError(f"recipe: no recipe {name!r:.60}{nearest(name, recipe_names())}")


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe by name or path and apply `group.key=value` overrides."""
    return Recipe.build(apply_overrides(read_yaml(recipe_text(name), name), overrides), where=name)


def dump_recipe(recipe: Recipe) -> str:
    """Serialize a recipe with all defaults; loading the text gives an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
