"""OpenAI's GPT and GPT-2 of Hugging Face: transposed linear layers and fused QKV."""

from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import TO_HF_ACTIVATION, Adapter, Renames, read_activation
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.name_table import TRANSPOSED, Entry, NameTable, with_prefix
from clearhead.config import ModelConfig

LAYER: NameTable = {
    "attention.query.*": Entry("attn.c_attn.*", TRANSPOSED, 0),
    "attention.key.*": Entry("attn.c_attn.*", TRANSPOSED, 1),
    "attention.value.*": Entry("attn.c_attn.*", TRANSPOSED, 2),
    "attention.output.*": Entry("attn.c_proj.*", TRANSPOSED),
    "attention_norm.*": "ln_1.*",
    "feed_forward.up.*": Entry("mlp.c_fc.*", TRANSPOSED),
    "feed_forward.down.*": Entry("mlp.c_proj.*", TRANSPOSED),
    "feed_forward_norm.*": "ln_2.*",
}
COMMON: NameTable = {
    **with_prefix("decoder.layers.*", "transformer.h.*", LAYER),
    "heads.lm_head.proj.weight": "lm_head.weight",
}
GPT1_TABLE: NameTable = {
    "decoder.embedding.tokens.weight": "transformer.tokens_embed.weight",
    "decoder.embedding.positions.weight": "transformer.positions_embed.weight",
    **COMMON,
}
GPT2_TABLE: NameTable = {
    "decoder.embedding.tokens.weight": "transformer.wte.weight",
    "decoder.embedding.positions.weight": "transformer.wpe.weight",
    "decoder.norm.*": "transformer.ln_f.*",
    **COMMON,
}
SUMMARY_KEYS = [f"summary_{key}" for key in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")]
NAMES = {"n_layer": "decoder_layers", "n_embd": "dim", "n_head": "heads", "n_positions": "max_positions"}


def _common_settings(fields: Fields, **overrides: Any) -> ModelConfig:
    fields.require("cross-attention", "add_cross_attention", False)
    fields.require("attention without 1/√E", "scale_attn_weights", True)
    fields.require("attention scaled by the layer index", "scale_attn_by_inverse_layer_idx", False)
    fields.ignore(
        *SUMMARY_KEYS,
        "n_ctx",
        "reorder_and_upcast_attn",
        "embd_pdrop",
        "task_specific_params",
        "predict_special_tokens",
    )
    settings: dict[str, Any] = {ours: fields.integer(theirs) for theirs, ours in NAMES.items()} | {
        "family": "decoder",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "dropout": fields.number("resid_pdrop", 0.1),
        "attention_dropout": fields.number("attn_pdrop", 0.1),
        "position": "learned",
        "vocab_size": fields.integer("vocab_size"),
        "tie": "output" if fields.flag("tie_word_embeddings", True) else "none",
        "init": "scaled",
    }
    return ModelConfig.build(settings | overrides, where=str(fields.where))


def gpt1_from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings; its gelu is the tanh approximation."""
    activation = "gelu_tanh" if fields.data.get("afn", "gelu") == "gelu" else read_activation(fields, "afn", "gelu")
    fields.ignore("afn")
    return _common_settings(fields, norm_position="post", activation=activation)


def gpt2_from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings of a pre-norm decoder with a final norm."""
    inner = {"ff_dim": fields.integer("n_inner")} if fields.has("n_inner") else {}
    fields.ignore("n_inner")
    return _common_settings(
        fields, norm_position="pre", activation=read_activation(fields, "activation_function", "gelu_new"), **inner
    )


def _common_hf_config(config: ModelConfig) -> dict[str, Any]:
    return {theirs: getattr(config, ours) for theirs, ours in NAMES.items()} | {
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def gpt1_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    activation = "gelu" if config.activation == "gelu_tanh" else TO_HF_ACTIVATION.get(config.activation, "gelu")
    hf_config = {"architectures": ["OpenAIGPTLMHeadModel"], "model_type": "openai-gpt", "afn": activation}
    return hf_config | _common_hf_config(config)


def gpt2_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    activation = TO_HF_ACTIVATION.get(config.activation, "gelu_new")
    hf_config: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    return hf_config | {"activation_function": activation, "n_inner": config.ff_dim} | _common_hf_config(config)


def renames(config: ModelConfig) -> Renames:
    """OpenAI's own files have no prefix."""
    return ((r"^(tokens_embed|positions_embed|wte|wpe|ln_f|h)\.", r"transformer.\1."),)


BUFFERS = (r".*\.attn\.(masked_)?bias",)  # causal masks and their fill value
GPT1 = Adapter("GPT", ("openai-gpt",), "decoder", lambda _: GPT1_TABLE, gpt1_from_hf, gpt1_to_hf, renames, BUFFERS)
GPT2 = Adapter("GPT-2", ("gpt2",), "decoder", lambda _: GPT2_TABLE, gpt2_from_hf, gpt2_to_hf, renames, BUFFERS)
