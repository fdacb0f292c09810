"""Phi-3: Llama with q, k and v in one tensor, and gate and up in another."""

from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import Adapter
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.llama import TABLE, decoder_settings, decoder_to_hf, renames
from clearhead.checkpoint.formats.name_table import SAME, Entry, NameTable, with_prefix
from clearhead.config import ModelConfig
from clearhead.errors import UserError

PHI3_TABLE: NameTable = TABLE | with_prefix(
    "decoder.layers.*",
    "model.layers.*",
    {
        "attention.query.weight": Entry("self_attn.qkv_proj.weight", SAME, 0),
        "attention.key.weight": Entry("self_attn.qkv_proj.weight", SAME, 1),
        "attention.value.weight": Entry("self_attn.qkv_proj.weight", SAME, 2),
        "feed_forward.gate.weight": Entry("mlp.gate_up_proj.weight", SAME, 0),
        "feed_forward.up.weight": Entry("mlp.gate_up_proj.weight", SAME, 1),
    },
)
DROPOUTS = ("resid_pdrop", "embd_pdrop")


def from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings; models for long contexts (longrope) are refused by `decoder_settings`."""
    fields.ignore("original_max_position_embeddings")
    settings = decoder_settings(fields)
    fields.require("a head_dim other than hidden_size / heads", "head_dim", settings["dim"] // settings["heads"])
    settings |= {"norm_eps": fields.number("rms_norm_eps", 1e-5), "dropout": fields.number("resid_pdrop", 0.0)}
    fields.require("a dropout of embeddings other than resid_pdrop", "embd_pdrop", 0.0, settings["dropout"])
    if fields.has("sliding_window"):
        settings |= {"attention": "window", "window": fields.integer("sliding_window")}
    fields.ignore("sliding_window")
    return ModelConfig.build(settings, where=str(fields.where))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    if config.head_dim * config.heads != config.dim:
        raise UserError(f"head_dim is {config.head_dim} in this model, but dim / heads there")
    settings = decoder_to_hf(config, "Phi3ForCausalLM", "phi3") | dict.fromkeys(DROPOUTS, config.dropout)
    return settings | {"sliding_window": config.window, "original_max_position_embeddings": config.max_positions}


PHI3 = Adapter("Phi-3", ("phi3",), "decoder", lambda _: PHI3_TABLE, from_hf, to_hf, renames)
