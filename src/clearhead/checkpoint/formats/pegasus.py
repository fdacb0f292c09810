"""Pegasus models of Hugging Face: as MarianMT, with pre-norm, final norms and one shared vocabulary."""

from collections.abc import Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.checkpoint.formats import marian
from clearhead.checkpoint.formats.adapter import Adapter
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.name_table import NameTable
from clearhead.config import ModelConfig


def table(config: ModelConfig) -> NameTable:
    """Return Marian's table and the final norms."""
    return {**marian.SHARED_EMBEDDING, **marian.TABLE, "*.norm.*": "model.*.layer_norm.*"}


def from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings."""
    fields.require("post-norm", "normalize_before", True)
    fields.require("no final norm", "add_final_layer_norm", True)
    size = {"vocab_size": fields.integer("vocab_size"), "tie": "all"}
    settings = marian.read_settings(fields) | {"norm_position": "pre"} | size
    return ModelConfig.build(settings, where=str(fields.where))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    settings = marian.to_hf(config) | {"architectures": ["PegasusForConditionalGeneration"], "model_type": "pegasus"}
    return {key: value for key, value in settings.items() if key not in marian.TWO_VOCABULARIES}


def stored_positions(config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the sinusoids of both stacks as transformers stores them, which warns where they are missing."""
    exponents = np.arange(0, config.dim, 2) / config.dim
    angles = np.arange(config.max_positions)[:, None] / np.power(10_000, exponents)
    halves = torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1)).float().to(dtype)
    return {f"model.{stack}.embed_positions.weight": halves.clone() for stack in ("encoder", "decoder")}


PEGASUS = Adapter(
    "Pegasus", ("pegasus",), "encoder-decoder", table, from_hf, to_hf, marian.renames, (marian.POSITIONS,)
)
