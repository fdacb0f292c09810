"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions start at 2, with a classifier of two layers."""

import re
from collections.abc import Set
from functools import partial
from typing import Any

from clearhead.checkpoint.formats.adapter import TO_HF_ACTIVATION, Adapter, Renames, read_activation
from clearhead.checkpoint.formats.bert import EMBEDDING, LAYER
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.encoder_heads import read_heads, write_heads
from clearhead.checkpoint.formats.name_table import NameTable, with_prefix
from clearhead.config import ModelConfig
from clearhead.errors import UserError

HEADS: NameTable = {
    "heads.lm_head.transform.linear.*": "lm_head.dense.*",
    "heads.lm_head.transform.norm.*": "lm_head.layer_norm.*",
    "heads.lm_head.proj.weight": "lm_head.decoder.weight",
    "heads.lm_head.proj.bias": "lm_head.bias",
    "heads.classes.proj.*": "classifier.out_proj.*",
    "heads.tags.proj.*": "classifier.*",
    "heads.span.*": "qa_outputs.*",
}
OUTPUTS = {
    "lm_head.": "lm",
    "classifier.out_proj.": "classes",
    "classifier.weight": "tags",
    "qa_outputs.": "span",
}
DEFAULT_PAD = 1


def table(config: ModelConfig) -> NameTable:
    """Return the table of a model with these outputs; in a classifier, the pooler is a layer of its head."""
    prefix = _prefix(config)
    pooler = "classifier" if "classes" in config.outputs else f"{prefix}pooler"
    return {
        **with_prefix("encoder.embedding", f"{prefix}embeddings", EMBEDDING),
        **with_prefix("encoder.layers.*", f"{prefix}encoder.layer.*", LAYER),
        "heads.pooler.linear.*": f"{pooler}.dense.*",
        **HEADS,
    }


def _prefix(config: ModelConfig) -> str:
    return "roberta." if config.outputs else ""


def from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings; positions start after the id of padding."""
    fields.require("a causal encoder", "is_decoder", False)
    fields.require("cross-attention", "add_cross_attention", False)
    fields.require("relative positions", "position_embedding_type", "absolute")
    heads = read_heads(fields, names, OUTPUTS)
    offset = fields.integer("pad_token_id", DEFAULT_PAD) + 1
    settings: dict[str, Any] = heads | {
        "family": "encoder",
        "encoder_layers": fields.integer("num_hidden_layers"),
        "dim": fields.integer("hidden_size"),
        "heads": fields.integer("num_attention_heads"),
        "ff_dim": fields.integer("intermediate_size"),
        "activation": read_activation(fields, "hidden_act", "gelu"),
        "norm_position": "post",
        "norm_eps": fields.number("layer_norm_eps", 1e-12),
        "dropout": fields.number("hidden_dropout_prob", 0.1),
        "attention_dropout": fields.number("attention_probs_dropout_prob", 0.1),
        "position": "learned",
        "position_offset": offset,
        "max_positions": fields.integer("max_position_embeddings") - offset,
        "vocab_size": fields.integer("vocab_size"),
        "segments": fields.integer("type_vocab_size", 2),
        "embedding_norm": True,
        "pooler": "classes" in heads["outputs"] or any(re.match(r"(roberta\.)?pooler\.", name) for name in names),
        "init": "truncated",
    }
    if "lm" in heads["outputs"] and settings["activation"] != "gelu":
        raise UserError(f"{fields.where}: hidden_act: {settings['activation']} with an LM head, which uses gelu")
    return ModelConfig.build(settings, where=str(fields.where))


def to_hf(config: ModelConfig, prefix: str, model_type: str) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    if not config.segments:
        raise UserError("segments is 0 in this model, but at least 1 in Hugging Face")
    if config.pooling != "cls" and config.pooler:
        raise UserError(f"pooling is {config.pooling} in this model, but cls in Hugging Face")
    return write_heads(config, prefix) | {
        "model_type": model_type,
        "num_hidden_layers": config.encoder_layers,
        "hidden_size": config.dim,
        "num_attention_heads": config.heads,
        "intermediate_size": config.ff_dim,
        "hidden_act": TO_HF_ACTIVATION.get(config.activation, "gelu"),
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_positions + config.position_offset,
        "pad_token_id": max(config.position_offset, 1) - 1,
        "vocab_size": config.vocab_size,
        "type_vocab_size": config.segments,
    }


def renames(config: ModelConfig) -> Renames:
    """Add or remove the prefix; the bias of the LM head has two names."""
    return (
        (r"^(?:roberta\.)?(embeddings|encoder|pooler)\.", rf"{_prefix(config)}\1."),
        (r"^lm_head\.decoder\.bias$", "lm_head.bias"),
    )


COMPUTED = (r".*embeddings\.position_ids",)


def _adapter(name: str, prefix: str, model_type: str) -> Adapter:
    write = partial(to_hf, prefix=prefix, model_type=model_type)
    return Adapter(name, (model_type,), "encoder", table, from_hf, write, renames, COMPUTED)


ROBERTA = _adapter("RoBERTa", "Roberta", "roberta")
XLM_ROBERTA = _adapter("XLM-RoBERTa", "XLMRoberta", "xlm-roberta")
CAMEMBERT = _adapter("CamemBERT", "Camembert", "camembert")
