"""DistilBERT: BERT without segments, with a classifier of two layers and a relu."""

from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import TO_HF_ACTIVATION, Adapter, Renames, read_activation
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.encoder_heads import read_heads, write_heads
from clearhead.checkpoint.formats.name_table import NameTable, with_prefix
from clearhead.config import ModelConfig
from clearhead.errors import UserError

LAYER: NameTable = {
    "attention.query.*": "attention.q_lin.*",
    "attention.key.*": "attention.k_lin.*",
    "attention.value.*": "attention.v_lin.*",
    "attention.output.*": "attention.out_lin.*",
    "attention_norm.*": "sa_layer_norm.*",
    "feed_forward.up.*": "ffn.lin1.*",
    "feed_forward.down.*": "ffn.lin2.*",
    "feed_forward_norm.*": "output_layer_norm.*",
}
EMBEDDING: NameTable = {
    "tokens.weight": "word_embeddings.weight",
    "positions.weight": "position_embeddings.weight",
    "norm.*": "LayerNorm.*",
}
OUTPUTS = {"vocab_transform.": "lm", "pre_classifier.": "classes", "classifier.": "tags", "qa_outputs.": "span"}


def table(config: ModelConfig) -> NameTable:
    """Return the table of a model with these outputs."""
    prefix = "distilbert." if config.outputs else ""
    return {
        **with_prefix("encoder.embedding", f"{prefix}embeddings", EMBEDDING),
        **with_prefix("encoder.layers.*", f"{prefix}transformer.layer.*", LAYER),
        "heads.lm_head.transform.linear.*": "vocab_transform.*",
        "heads.lm_head.transform.norm.*": "vocab_layer_norm.*",
        "heads.lm_head.proj.*": "vocab_projector.*",
        "heads.pooler.linear.*": "pre_classifier.*",
        "heads.classes.proj.*": "classifier.*",
        "heads.tags.proj.*": "classifier.*",
        "heads.span.*": "qa_outputs.*",
    }


def from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings; the sinusoids of some models are stored like learned positions."""
    heads = read_heads(fields, names, OUTPUTS)
    if "classes" in heads["outputs"]:
        heads["outputs"] = [each for each in heads["outputs"] if each != "tags"]  # both have the name `classifier`
    fields.ignore("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_")
    settings: dict[str, Any] = heads | {
        "family": "encoder",
        "encoder_layers": fields.integer("n_layers"),
        "dim": fields.integer("dim"),
        "heads": fields.integer("n_heads"),
        "ff_dim": fields.integer("hidden_dim"),
        "activation": read_activation(fields, "activation", "gelu"),
        "norm_position": "post",
        "norm_eps": 1e-12,  # not in their config
        "dropout": fields.number("dropout", 0.1),
        "attention_dropout": fields.number("attention_dropout", 0.1),
        "position": "learned",
        "max_positions": fields.integer("max_position_embeddings"),
        "vocab_size": fields.integer("vocab_size"),
        "embedding_norm": True,
        "pooler": "classes" in heads["outputs"],
        "pooler_activation": "relu" if "classes" in heads["outputs"] else "tanh",
        "init": "truncated",
    }
    return ModelConfig.build(settings, where=str(fields.where))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    if config.pooling != "cls" and config.pooler:
        raise UserError(f"pooling is {config.pooling} in this model, but cls in Hugging Face")
    return write_heads(config, "DistilBert") | {
        "model_type": "distilbert",
        "n_layers": config.encoder_layers,
        "dim": config.dim,
        "n_heads": config.heads,
        "hidden_dim": config.ff_dim,
        "activation": TO_HF_ACTIVATION.get(config.activation, "gelu"),
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
    }


def renames(config: ModelConfig) -> Renames:
    """Add or remove the prefix."""
    return ((r"^(?:distilbert\.)?(embeddings|transformer)\.", ("distilbert." if config.outputs else "") + r"\1."),)


DISTILBERT = Adapter(
    "DistilBERT", ("distilbert",), "encoder", table, from_hf, to_hf, renames, (r".*embeddings\.position_ids",)
)
