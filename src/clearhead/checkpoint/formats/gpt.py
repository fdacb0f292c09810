"""OpenAI's GPT and GPT-2 as Hugging Face keeps them: linear layers transposed; queries, keys and values as one."""

from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import ACTIVATIONS, Adapter, Renames, spelt
from clearhead.checkpoint.formats.fields import Fields
from clearhead.checkpoint.formats.tables import TRANSPOSED, Entry, Table, under
from clearhead.config import ModelConfig

LAYER: Table = {
    "attention.query.*": Entry("attn.c_attn.*", TRANSPOSED, 0),
    "attention.key.*": Entry("attn.c_attn.*", TRANSPOSED, 1),
    "attention.value.*": Entry("attn.c_attn.*", TRANSPOSED, 2),
    "attention.output.*": Entry("attn.c_proj.*", TRANSPOSED),
    "attention_norm.*": "ln_1.*",
    "feed_forward.up.*": Entry("mlp.c_fc.*", TRANSPOSED),
    "feed_forward.down.*": Entry("mlp.c_proj.*", TRANSPOSED),
    "feed_forward_norm.*": "ln_2.*",
}
COMMON: Table = {
    **under("decoder.layers.*", "transformer.h.*", LAYER),
    "heads.lm_head.proj.weight": "lm_head.weight",
}
GPT1_TABLE: Table = {
    "decoder.embedding.tokens.weight": "transformer.tokens_embed.weight",
    "decoder.embedding.positions.weight": "transformer.positions_embed.weight",
    **COMMON,
}
GPT2_TABLE: Table = {
    "decoder.embedding.tokens.weight": "transformer.wte.weight",
    "decoder.embedding.positions.weight": "transformer.wpe.weight",
    "decoder.norm.*": "transformer.ln_f.*",
    **COMMON,
}
SUMMARY = [f"summary_{key}" for key in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")]
NAMES = {"n_layer": "decoder_layers", "n_embd": "dim", "n_head": "heads", "n_positions": "max_positions"}


def _ours(fields: Fields, **differs: Any) -> ModelConfig:
    fields.must("cross-attention", "add_cross_attention", False)
    fields.must("attention without 1/√E", "scale_attn_weights", True)
    fields.must("attention scaled by the number of the layer", "scale_attn_by_inverse_layer_idx", False)
    fields.ignore(
        *SUMMARY, "n_ctx", "reorder_and_upcast_attn", "embd_pdrop", "task_specific_params", "predict_special_tokens"
    )
    settings: dict[str, Any] = {ours: fields.whole(theirs) for theirs, ours in NAMES.items()} | {
        "family": "decoder",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "dropout": fields.number("resid_pdrop", 0.1),
        "attention_dropout": fields.number("attn_pdrop", 0.1),
        "position": "learned",
        "vocab_size": fields.whole("vocab_size"),
        "tie": "output" if fields.flag("tie_word_embeddings", True) else "none",
        "init": "scaled",
    }
    return ModelConfig.build(settings | differs, where=str(fields.where))


def gpt1_ours(fields: Fields, names: Set[str]) -> ModelConfig:
    """What it calls gelu is the tanh approximation."""
    activation = "gelu_tanh" if fields.data.get("afn", "gelu") == "gelu" else spelt(fields, "afn", "gelu")
    fields.ignore("afn")
    return _ours(fields, norm_position="post", activation=activation)


def gpt2_ours(fields: Fields, names: Set[str]) -> ModelConfig:
    """The norm in front, a norm behind the last layer."""
    inner = {"ff_dim": fields.whole("n_inner")} if fields.has("n_inner") else {}
    fields.ignore("n_inner")
    return _ours(fields, norm_position="pre", activation=spelt(fields, "activation_function", "gelu_new"), **inner)


def _theirs(config: ModelConfig) -> dict[str, Any]:
    return {theirs: getattr(config, ours) for theirs, ours in NAMES.items()} | {
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def gpt1_theirs(config: ModelConfig) -> dict[str, Any]:
    """The same in their words."""
    activation = "gelu" if config.activation == "gelu_tanh" else ACTIVATIONS.get(config.activation, "gelu")
    about = {"architectures": ["OpenAIGPTLMHeadModel"], "model_type": "openai-gpt", "afn": activation}
    return about | _theirs(config)


def gpt2_theirs(config: ModelConfig) -> dict[str, Any]:
    """The same in their words."""
    activation = ACTIVATIONS.get(config.activation, "gelu_new")
    about: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    return about | {"activation_function": activation, "n_inner": config.ff_dim} | _theirs(config)


def renames(config: ModelConfig) -> Renames:
    """OpenAI's own files lack the prefix."""
    return ((r"^(tokens_embed|positions_embed|wte|wpe|ln_f|h)\.", r"transformer.\1."),)


BUFFERS = (r".*\.attn\.(masked_)?bias",)  # triangles of ones, and what they put in the place of zeros
GPT1 = Adapter("GPT", ("openai-gpt",), "decoder", lambda _: GPT1_TABLE, gpt1_ours, gpt1_theirs, renames, BUFFERS)
GPT2 = Adapter("GPT-2", ("gpt2",), "decoder", lambda _: GPT2_TABLE, gpt2_ours, gpt2_theirs, renames, BUFFERS)
