"""ModernBERT: a pre-norm encoder with rotary positions, GeGLU, no biases, and windows in two of three layers."""

from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import Adapter, Renames
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.encoder_heads import read_heads, write_heads
from clearhead.checkpoint.formats.layer_types import read_layer_types, window_settings, write_layer_types
from clearhead.checkpoint.formats.name_table import SAME, Entry, NameTable, with_prefix
from clearhead.config import ModelConfig
from clearhead.errors import UserError

LAYER: NameTable = {
    "attention.query.weight": Entry("attn.Wqkv.weight", SAME, 0),
    "attention.key.weight": Entry("attn.Wqkv.weight", SAME, 1),
    "attention.value.weight": Entry("attn.Wqkv.weight", SAME, 2),
    "attention.output.weight": "attn.Wo.weight",
    "attention_norm.weight": "attn_norm.weight",
    "feed_forward.gate.weight": Entry("mlp.Wi.weight", SAME, 0),
    "feed_forward.up.weight": Entry("mlp.Wi.weight", SAME, 1),
    "feed_forward.down.weight": "mlp.Wo.weight",
    "feed_forward_norm.weight": "mlp_norm.weight",
}
OUTPUTS = {"decoder.": "lm", "classifier.": "classes"}
GLOBAL_THETA, LOCAL_THETA, EVERY, LOCAL_ATTENTION = 160_000.0, 10_000.0, 3, 128  # defaults of its config


def table(config: ModelConfig) -> NameTable:
    """Return the table of a model with these outputs."""
    prefix = "model." if config.outputs else ""
    return {
        "encoder.embedding.tokens.weight": f"{prefix}embeddings.tok_embeddings.weight",
        "encoder.embedding.norm.weight": f"{prefix}embeddings.norm.weight",
        **with_prefix("encoder.layers.*", f"{prefix}layers.*", LAYER),
        "encoder.norm.weight": f"{prefix}final_norm.weight",
        "heads.lm_head.transform.linear.weight": "head.dense.weight",
        "heads.lm_head.transform.norm.weight": "head.norm.weight",
        "heads.lm_head.proj.*": "decoder.*",
    }


def from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings of a model with an LM head or none."""
    heads = read_heads(fields, names, OUTPUTS)
    if "classes" in heads["outputs"]:
        raise UserError(f"{fields.where}: architectures: a ModernBERT with a classifier is not supported")
    for key in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"):
        fields.require("this bias", key, False)
    fields.require("an LM head without a bias", "decoder_bias", True)
    fields.require("this activation", "hidden_activation", "gelu")
    fields.require("this activation", "classifier_activation", "gelu")
    fields.ignore("classifier_pooling", "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index")
    fields.ignore("initializer_cutoff_factor", "reference_compile", "repad_logits_with_grad", "layer_norm_eps")
    fields.ignore("embedding_dropout", "cls_token_id", "position_embedding_type")
    layers, every = fields.integer("num_hidden_layers"), fields.integer("global_attn_every_n_layers", EVERY)
    patterns = read_layer_types(fields, layers, lambda number: "window" if number % max(1, every) else "full")
    global_theta, local_theta = _thetas(fields)
    settings: dict[str, Any] = heads | {
        "family": "encoder",
        "encoder_layers": layers,
        "dim": fields.integer("hidden_size"),
        "heads": fields.integer("num_attention_heads"),
        "ff_dim": fields.integer("intermediate_size"),
        "activation": "geglu",
        "norm_eps": fields.number("norm_eps", 1e-5),
        "bias": False,
        "dropout": fields.number("mlp_dropout", 0.0),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "position": "rotary",
        "rope_theta": global_theta,
        "local_rope_theta": local_theta if "window" in patterns else None,
        "max_positions": fields.integer("max_position_embeddings"),
        "vocab_size": fields.integer("vocab_size"),
        "embedding_norm": True,
        "first_norm": False,
        "init": "truncated",
    }
    window = fields.integer("local_attention", LOCAL_ATTENTION) // 2 + 1  # tokens on each side, and the token itself
    return ModelConfig.build(settings | window_settings(patterns, window), where=str(fields.where))


def _thetas(fields: Fields) -> tuple[float, float]:
    """Return the global and the local rope_theta, in the keys of newer and older files."""
    fields.require("scaled rotary positions", "rope_scaling")
    thetas = [fields.number("global_rope_theta", GLOBAL_THETA), fields.number("local_rope_theta", LOCAL_THETA)]
    rope = fields.group("rope_parameters") or Fields({}, fields.where)
    for number, kind in enumerate(("full_attention", "sliding_attention")):
        if (group := rope.group(kind)) is not None:
            group.require("this type of rotary positions", "rope_type", "default")
            thetas[number] = group.number("rope_theta", thetas[number])
    return thetas[0], thetas[1]


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    rope = {"full_attention": config.rope_theta, "sliding_attention": config.local_rope_theta or config.rope_theta}
    return write_heads(config, "ModernBert") | {
        "model_type": "modernbert",
        "num_hidden_layers": config.encoder_layers,
        "hidden_size": config.dim,
        "num_attention_heads": config.heads,
        "intermediate_size": config.ff_dim,
        "norm_eps": config.norm_eps,
        "mlp_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "layer_types": write_layer_types(config, config.encoder_layers),
        "local_attention": 2 * ((config.window or LOCAL_ATTENTION // 2 + 1) - 1),
        "rope_parameters": {key: {"rope_type": "default", "rope_theta": theta} for key, theta in rope.items()},
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
    }


def renames(config: ModelConfig) -> Renames:
    """Add or remove the prefix."""
    return ((r"^(?:model\.)?(embeddings|layers|final_norm)\.", ("model." if config.outputs else "") + r"\1."),)


MODERNBERT = Adapter("ModernBERT", ("modernbert",), "encoder", table, from_hf, to_hf, renames)
