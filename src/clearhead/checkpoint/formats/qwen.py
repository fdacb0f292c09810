"""Qwen2, Qwen2.5 and the dense models of Qwen3: Llama with biases of q, k and v, or with normalized q and k."""

from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import Adapter
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.layer_types import read_layer_types, window_settings, write_layer_types
from clearhead.checkpoint.formats.llama import TABLE, decoder_settings, decoder_to_hf, renames
from clearhead.checkpoint.formats.name_table import NameTable, with_prefix
from clearhead.config import ModelConfig
from clearhead.errors import UserError

QWEN2_TABLE: NameTable = TABLE | with_prefix(
    "decoder.layers.*.attention",
    "model.layers.*.self_attn",
    {"query.bias": "q_proj.bias", "key.bias": "k_proj.bias", "value.bias": "v_proj.bias"},
)
QWEN3_TABLE: NameTable = TABLE | with_prefix(
    "decoder.layers.*.attention",
    "model.layers.*.self_attn",
    {"query_norm.weight": "q_norm.weight", "key_norm.weight": "k_norm.weight"},
)
WINDOW, FIRST_WINDOW_LAYER, QWEN3_HEAD_DIM = 4096, 28, 128  # defaults of their configs


def _settings(fields: Fields) -> dict[str, Any]:
    settings = decoder_settings(fields)
    layers, first = settings["decoder_layers"], fields.integer("max_window_layers", FIRST_WINDOW_LAYER)
    has_window = fields.flag("use_sliding_window", False)
    fields.ignore("sliding_window", "use_mrope")
    patterns = read_layer_types(fields, layers, lambda number: "window" if has_window and number >= first else "full")
    window = fields.integer("sliding_window", WINDOW) if "window" in patterns else None
    return settings | window_settings(patterns, window)


def qwen2_from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings of a model with biases of q, k and v."""
    settings = _settings(fields) | {"qkv_bias": True}
    fields.require("a head_dim other than hidden_size / heads", "head_dim", settings["dim"] // settings["heads"])
    return ModelConfig.build(settings, where=str(fields.where))


def qwen3_from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings of a model with normalized q and k."""
    settings = _settings(fields) | {"qk_norm": True, "head_dim": fields.integer("head_dim", QWEN3_HEAD_DIM)}
    return ModelConfig.build(settings, where=str(fields.where))


def _to_hf(config: ModelConfig, architecture: str, model_type: str) -> dict[str, Any]:
    settings = decoder_to_hf(config, architecture, model_type)
    return settings | {
        "use_sliding_window": "window" in config.attention,
        "sliding_window": config.window,
        "layer_types": write_layer_types(config, config.decoder_layers),
    }


def qwen2_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    if config.head_dim * config.heads != config.dim:
        raise UserError(f"head_dim is {config.head_dim} in this model, but dim / heads there")
    return _to_hf(config, "Qwen2ForCausalLM", "qwen2")


def qwen3_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    return _to_hf(config, "Qwen3ForCausalLM", "qwen3") | {"head_dim": config.head_dim, "attention_bias": False}


BUFFERS = (r".*rotary_emb\.inv_freq",)
QWEN2 = Adapter("Qwen2", ("qwen2",), "decoder", lambda _: QWEN2_TABLE, qwen2_from_hf, qwen2_to_hf, renames, BUFFERS)
QWEN3 = Adapter("Qwen3", ("qwen3",), "decoder", lambda _: QWEN3_TABLE, qwen3_from_hf, qwen3_to_hf, renames, BUFFERS)
