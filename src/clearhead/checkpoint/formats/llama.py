"""Llama 1 to 3.2 and models of the same architecture (SmolLM2, Mistral with its window) of Hugging Face."""

from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import Adapter, Renames
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.name_table import NameTable, with_prefix
from clearhead.config import ModelConfig
from clearhead.errors import UserError

TABLE: NameTable = {
    "decoder.embedding.tokens.weight": "model.embed_tokens.weight",
    **with_prefix(
        "decoder.layers.*",
        "model.layers.*",
        {
            "attention_norm.weight": "input_layernorm.weight",
            "attention.query.weight": "self_attn.q_proj.weight",
            "attention.key.weight": "self_attn.k_proj.weight",
            "attention.value.weight": "self_attn.v_proj.weight",
            "attention.output.weight": "self_attn.o_proj.weight",
            "feed_forward_norm.weight": "post_attention_layernorm.weight",
            "feed_forward.gate.weight": "mlp.gate_proj.weight",
            "feed_forward.up.weight": "mlp.up_proj.weight",
            "feed_forward.down.weight": "mlp.down_proj.weight",
        },
    ),
    "decoder.norm.weight": "model.norm.weight",
    "heads.lm_head.proj.weight": "lm_head.weight",
}
LLAMA_SETTINGS = {"family": "decoder", "activation": "swiglu", "norm": "rms", "bias": False, "position": "rotary"}
NAMES = {
    "num_hidden_layers": "decoder_layers",
    "hidden_size": "dim",
    "num_attention_heads": "heads",
    "intermediate_size": "ff_dim",
    "max_position_embeddings": "max_positions",
    "vocab_size": "vocab_size",
}
ROPE_SCALING_NAMES = {  # our name to Hugging Face's
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
MISTRAL_WINDOW = 4096  # default of its config


def from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings; only a Mistral has a window, and every layer has it."""
    settings = decoder_settings(fields)
    fields.require("interleaved rotary pairs", "rope_interleaved", False)
    fields.ignore("pretraining_tp", "is_llama_config", "transformers.js_config")
    if fields.has("head_dim"):
        settings["head_dim"] = fields.integer("head_dim")
    if fields.data.get("model_type") != "mistral":
        fields.require("a window in a Llama", "sliding_window")
    elif fields.data.get("sliding_window", MISTRAL_WINDOW) is not None:
        settings |= {"attention": "window", "window": fields.integer("sliding_window", MISTRAL_WINDOW)}
    fields.ignore("head_dim", "sliding_window")
    return ModelConfig.build(settings, where=str(fields.where))


def decoder_settings(fields: Fields) -> dict[str, Any]:
    """Read the settings that all decoders of this kind have: Llama, Qwen, Phi-3."""
    fields.require("attention biases", "attention_bias", False)
    fields.require("feed-forward biases", "mlp_bias", False)
    fields.require("this activation", "hidden_act", "silu", "swish")
    fields.require("a partial rotary embedding", "partial_rotary_factor", 1.0, 1)
    settings: dict[str, Any] = {ours: fields.integer(theirs) for theirs, ours in NAMES.items()} | {
        **LLAMA_SETTINGS,
        "kv_heads": fields.integer("num_key_value_heads", fields.integer("num_attention_heads")),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "tie": "output" if fields.flag("tie_word_embeddings", False) else "none",
    }
    return settings | rope_settings(fields)


def rope_settings(fields: Fields) -> dict[str, Any]:
    """Read rope_theta and Llama 3's scaling, in the keys of newer and older files."""
    newer, older = fields.group("rope_parameters"), fields.group("rope_scaling")
    rope = older or newer or Fields({}, fields.where)  # transformers prefers the older one, too
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"{rope.where}: rope_type: scaling of type {kind!r:.40} is not supported, only llama3")
    settings: dict[str, Any] = {"rope_theta": rope.number("rope_theta", fields.number("rope_theta", 10_000.0))}
    if kind == "llama3":
        original = {"original_positions": rope.integer(ROPE_SCALING_NAMES["original_positions"])}
        settings["rope_scaling"] = {ours: rope.number(theirs) for ours, theirs in ROPE_SCALING_NAMES.items()} | original
    rope.require("a partial rotary embedding", "partial_rotary_factor", 1.0, 1)
    if unknown := rope.unknown():
        raise UserError(f"{rope.where}: {', '.join(unknown)}: this type of rotary positions is not supported")
    return settings


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face; a model with a window is a Mistral."""
    window = config.window if config.attention == ("window",) else None
    architecture = ("MistralForCausalLM", "mistral") if window else ("LlamaForCausalLM", "llama")
    settings = decoder_to_hf(config, *architecture) | {"head_dim": config.head_dim}
    return settings | ({"sliding_window": window} if window else {})


def decoder_to_hf(config: ModelConfig, architecture: str, model_type: str) -> dict[str, Any]:
    """Return what `decoder_settings` reads."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta or 10_000.0}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3"}
        rope |= {theirs: getattr(config.rope_scaling, ours) for ours, theirs in ROPE_SCALING_NAMES.items()}
    return {theirs: getattr(config, ours) for theirs, ours in NAMES.items()} | {
        "architectures": [architecture],
        "model_type": model_type,
        "num_key_value_heads": config.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.attention_dropout,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie == "output",
    }


def renames(config: ModelConfig) -> Renames:
    """A model saved without its head has no prefix."""
    return ((r"^(embed_tokens|layers|norm)\.", r"model.\1."),)


LLAMA = Adapter(
    "Llama", ("llama", "mistral"), "decoder", lambda _: TABLE, from_hf, to_hf, renames, (r".*rotary_emb\.inv_freq",)
)
