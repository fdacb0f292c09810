"""Tiny runs of every family: recipes that take a second, and helpers to read what a run left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint import newest_checkpoint
from clearhead.config.load import apply_overrides
from clearhead.config.recipe import Recipe
from clearhead.data import Data, prepare
from clearhead.model import Network
from clearhead.train.init_from import init_network, load_initial_model, tokenizers_for
from clearhead.train.loop import Summary, train
from clearhead.train.run_log import read_log

SMALL = {"dim": 16, "heads": 2, "ff_dim": 32, "max_positions": 64}
EMBEDDED = {"format": "embedded", "level": 1, "languages": ["en"]}
SYMBOLS = {"format": "symbols", "symbols": 8, "min_length": 2, "max_length": 6}
TEXTS: dict[str, Any] = {
    "train": EMBEDDED | {"count": 120},
    "valid": EMBEDDED | {"count": 20, "split": "valid"},
    "max_length": 24,
    "batch_tokens": 240,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "translator": {
        "model": SMALL | {"preset": "tiny-translator", "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.1},
        "tokenizer": {"kind": "word", "vocab_size": 12},
        "data": {
            "task": "translation",
            "train": SYMBOLS | {"count": 150},
            "valid": SYMBOLS | {"count": 12, "split": "valid"},
            "max_length": 16,
            "batch_tokens": 240,
        },
    },
    "bert": {
        "model": SMALL | {"preset": "tiny-encoder", "encoder_layers": 1},
        "tokenizer": {"kind": "bpe", "vocab_size": 120},  # trained wordpiece differs between processes
        "data": TEXTS | {"task": "masked-language-model", "next_sentence": True},
    },
    "gpt": {
        "model": SMALL | {"preset": "tiny-gpt", "decoder_layers": 1},
        "tokenizer": {"kind": "byte-bpe", "vocab_size": 280},
        "data": TEXTS | {"task": "language-model"},
    },
    "llama": {
        "model": SMALL | {"preset": "tiny-llama", "decoder_layers": 2, "kv_heads": 1, "dropout": 0.1},
        "tokenizer": {"kind": "byte-bpe", "vocab_size": 280},
        "data": TEXTS | {"task": "language-model", "isolate_documents": True},
    },
}
TRAIN = {
    "steps": 10,
    "lr": 0.01,
    "warmup": 3,
    "log_every": 1,
    "validate_every": 1000,
    "save_every": 1000,
    "eval_samples": 4,
    "device": "cpu",
}
TIMES = ("seconds", "tokens_per_second")  # differ between equal runs


def recipe(family: str, *changes: str, **train_settings: Any) -> Recipe:
    """The tiny recipe of a family, changed by key=value and by train settings."""
    settings = FAMILIES[family] | {"train": TRAIN | train_settings}
    settings["data"] = settings["data"] | {"workers": 0}
    return Recipe.build(apply_overrides(settings, changes), where="test")


def prepared(recipe: Recipe) -> tuple[Data, Network]:
    """The data of a recipe and its network before the first step."""
    initial = load_initial_model(recipe)
    data = prepare(recipe.data, tokenizers_for(recipe, initial))
    return data, init_network(recipe, data, initial)


def run(out: Path, recipe: Recipe, **options: Any) -> Summary:
    """Train into `out`."""
    return train(recipe, out, **options)


def events(out: Path, kind: str = "") -> list[dict[str, Any]]:
    """The lines of a run's log, without the times."""
    return [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in read_log(out / "log.jsonl")
        if not kind or line["kind"] == kind
    ]


def losses(out: Path) -> list[float]:
    """The training losses of a run, one per log line."""
    return [event["loss"] for event in events(out, "step")]


def tensors(out: Path) -> dict[str, Tensor]:
    """Weights and optimizer of the newest checkpoint, by name."""
    state, damaged = newest_checkpoint(out)
    assert state is not None
    assert not damaged
    return {f"weights {name}": x.clone() for name, x in state.weights().items()} | {
        f"optimizer {name}": x.clone() for name, x in state.optimizer().items()
    }


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference between two sets of tensors; 0 means bit-identical."""
    assert left.keys() == right.keys()
    return max(
        0.0 if torch.equal(left[name], right[name]) else float((left[name] - right[name]).abs().max()) for name in left
    )
