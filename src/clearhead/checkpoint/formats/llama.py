"""Llama 1 to 3.2 and what is built like it (SmolLM2, Mistral with its window), as Hugging Face keeps them."""

from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import Adapter, Renames
from clearhead.checkpoint.formats.fields import Fields
from clearhead.checkpoint.formats.tables import Table, under
from clearhead.config import ModelConfig
from clearhead.errors import UserError

TABLE: Table = {
    "decoder.embedding.tokens.weight": "model.embed_tokens.weight",
    **under(
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
KIND = {"family": "decoder", "activation": "swiglu", "norm": "rms", "bias": False, "position": "rotary"}
NAMES = {
    "num_hidden_layers": "decoder_layers",
    "hidden_size": "dim",
    "num_attention_heads": "heads",
    "intermediate_size": "ff_dim",
    "max_position_embeddings": "max_positions",
    "vocab_size": "vocab_size",
}
SCALING = {  # ours to theirs
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
MISTRAL = 4096  # its window where a config says nothing


def ours(fields: Fields, names: Set[str]) -> ModelConfig:
    """The window is a whole model's, or none; a Llama has none, whatever its config says."""
    fields.must("biases beside attention", "attention_bias", False)
    fields.must("biases in the feed-forward layer", "mlp_bias", False)
    fields.must("this activation", "hidden_act", "silu", "swish")
    fields.must("rotary pairs side by side", "rope_interleaved", False)
    fields.must("rotation of a part of each head", "partial_rotary_factor", 1.0, 1)
    fields.ignore("pretraining_tp", "is_llama_config", "transformers.js_config")
    settings: dict[str, Any] = {ours: fields.whole(theirs) for theirs, ours in NAMES.items()} | {
        **KIND,
        "kv_heads": fields.whole("num_key_value_heads", fields.whole("num_attention_heads")),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "tie": "output" if fields.flag("tie_word_embeddings", False) else "none",
    }
    settings |= rotation(fields)
    if fields.has("head_dim"):
        settings["head_dim"] = fields.whole("head_dim")
    if fields.data.get("model_type") != "mistral":
        fields.must("a window in a Llama", "sliding_window")
    elif fields.data.get("sliding_window", MISTRAL) is not None:
        settings |= {"attention": "window", "window": fields.whole("sliding_window", MISTRAL)}
    fields.ignore("head_dim", "sliding_window")
    return ModelConfig.build(settings, where=str(fields.where))


def rotation(fields: Fields) -> dict[str, Any]:
    """The base of the rotary frequencies and Llama 3's rule, where newer and older files say them."""
    newer, older = fields.below("rope_parameters"), fields.below("rope_scaling")
    rope = older or newer or Fields({}, fields.where)  # their library, too, believes the older one
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"{rope.where}: rope_type: scaling of kind {kind!r:.40} cannot be represented here")
    settings: dict[str, Any] = {"rope_theta": rope.number("rope_theta", fields.number("rope_theta", 10_000.0))}
    if kind == "llama3":
        original = {"original_positions": rope.whole(SCALING["original_positions"])}
        settings["rope_scaling"] = {ours: rope.number(theirs) for ours, theirs in SCALING.items()} | original
    rope.must("rotation of a part of each head", "partial_rotary_factor", 1.0, 1)
    if unknown := rope.unknown():
        raise UserError(f"{rope.where}: {', '.join(unknown)}: rotary positions of this kind cannot be represented here")
    return settings


def theirs(config: ModelConfig) -> dict[str, Any]:
    """The same in their words; with a window it is a Mistral."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta or 10_000.0}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3"}
        rope |= {their: getattr(config.rope_scaling, our) for our, their in SCALING.items()}
    window = config.window if config.attention == ("window",) else None
    kind = ("MistralForCausalLM", "mistral") if window else ("LlamaForCausalLM", "llama")
    return {their: getattr(config, our) for their, our in NAMES.items()} | {
        "architectures": [kind[0]],
        "model_type": kind[1],
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.attention_dropout,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie == "output",
        **({"sliding_window": window} if window else {}),
    }


def renames(config: ModelConfig) -> Renames:
    """A model saved without its head lacks the prefix."""
    return ((r"^(embed_tokens|layers|norm)\.", r"model.\1."),)


LLAMA = Adapter(
    "Llama", ("llama", "mistral"), "decoder", lambda _: TABLE, ours, theirs, renames, (r".*rotary_emb\.inv_freq",)
)
