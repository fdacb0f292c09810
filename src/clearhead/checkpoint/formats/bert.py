"""BERT of Hugging Face, with any of its heads or none (sentence encoders like MiniLM)."""

import re
from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import TO_HF_ACTIVATION, Adapter, Renames, read_activation
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.name_table import NameTable, with_prefix
from clearhead.config import ModelConfig
from clearhead.errors import UserError

CLASS_OUTPUTS = {  # class of Hugging Face to our outputs
    "BertModel": (),
    "BertForMaskedLM": ("lm",),
    "BertForNextSentencePrediction": ("next-sentence",),
    "BertForPreTraining": ("lm", "next-sentence"),
    "BertForSequenceClassification": ("classes",),
    "BertForTokenClassification": ("tags",),
    "BertForQuestionAnswering": ("span",),
}
LAYER: NameTable = {
    "attention.query.*": "attention.self.query.*",
    "attention.key.*": "attention.self.key.*",
    "attention.value.*": "attention.self.value.*",
    "attention.output.*": "attention.output.dense.*",
    "attention_norm.*": "attention.output.LayerNorm.*",
    "feed_forward.up.*": "intermediate.dense.*",
    "feed_forward.down.*": "output.dense.*",
    "feed_forward_norm.*": "output.LayerNorm.*",
}
EMBEDDING: NameTable = {
    "tokens.weight": "word_embeddings.weight",
    "positions.weight": "position_embeddings.weight",
    "segments.weight": "token_type_embeddings.weight",
    "norm.*": "LayerNorm.*",
}


def table(config: ModelConfig) -> NameTable:
    """Return the table of a model with these outputs."""
    prefix = _prefix(config)
    return {
        **with_prefix("encoder.embedding", f"{prefix}embeddings", EMBEDDING),
        **with_prefix("encoder.layers.*", f"{prefix}encoder.layer.*", LAYER),
        "heads.pooler.linear.*": f"{prefix}pooler.dense.*",
        "heads.lm_head.transform.linear.*": "cls.predictions.transform.dense.*",
        "heads.lm_head.transform.norm.*": "cls.predictions.transform.LayerNorm.*",
        "heads.lm_head.proj.weight": "cls.predictions.decoder.weight",
        "heads.lm_head.proj.bias": "cls.predictions.bias",
        "heads.next_sentence.*": "cls.seq_relationship.*",
        "heads.classes.proj.*": "classifier.*",
        "heads.tags.proj.*": "classifier.*",
        "heads.span.*": "qa_outputs.*",
    }


def _prefix(config: ModelConfig) -> str:
    return "bert." if config.outputs else ""  # models without a head have no prefix


def from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings; the heads follow from the tensors, as published files often differ from their class."""
    fields.require("a causal encoder", "is_decoder", False)
    fields.require("cross-attention", "add_cross_attention", False)
    fields.require("relative positions", "position_embedding_type", "absolute")
    fields.require("multi-label classification", "problem_type", "single_label_classification", "regression")
    fields.ignore("classifier_dropout", "gradient_checkpointing", "num_labels", "id2label", "label2id")
    outputs = [name for tensor, name in _OUTPUTS.items() if any(each.startswith(tensor) for each in names)]
    labels = 0
    if any(each.startswith("classifier.") for each in names):
        head = next((CLASS_OUTPUTS[name] for name in fields.strings("architectures") if name in CLASS_OUTPUTS), ())
        if head not in (("classes",), ("tags",)):
            raise UserError(
                f"{fields.where}: architectures: the weights hold a classifier; name BertForSequenceClassification or "
                "BertForTokenClassification"
            )
        outputs.append(head[0])
        names_of_labels = fields.data.get("id2label")
        labels = len(names_of_labels) if isinstance(names_of_labels, dict) else fields.integer("num_labels", 2)
    if "lm" in outputs:
        fields.require("an untied output matrix", "tie_word_embeddings", True)
    fields.ignore("tie_word_embeddings")
    pooler = any(re.match(r"(bert\.)?pooler\.", each) for each in names)
    if "classes" in outputs and not pooler:
        raise UserError(f"{fields.where}: a sequence classifier without a pooler is not supported")
    settings: dict[str, Any] = {
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
        "max_positions": fields.integer("max_position_embeddings"),
        "vocab_size": fields.integer("vocab_size"),
        "segments": fields.integer("type_vocab_size", 2),
        "embedding_norm": True,
        "tie": "output" if "lm" in outputs else "none",
        "outputs": outputs,
        "output_bias": "lm" in outputs,
        "pooler": pooler,
        "labels": labels,
        "init": "truncated",
    }
    return ModelConfig.build(settings, where=str(fields.where))


_OUTPUTS = {"cls.predictions.": "lm", "cls.seq_relationship.": "next-sentence", "qa_outputs.": "span"}


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    names = [name for name, outputs in CLASS_OUTPUTS.items() if outputs == config.outputs]
    if not names:
        raise UserError(f"no Hugging Face class has outputs: {', '.join(config.outputs)}")
    if not config.segments:
        raise UserError("segments is 0 in this model, but at least 1 in Hugging Face")
    if config.pooling != "cls" and config.pooler:
        raise UserError(f"pooling is {config.pooling} in this model, but cls in Hugging Face")
    labels = {str(number): f"LABEL_{number}" for number in range(config.labels)}
    return {
        "architectures": names,
        "model_type": "bert",
        "num_hidden_layers": config.encoder_layers,
        "hidden_size": config.dim,
        "num_attention_heads": config.heads,
        "intermediate_size": config.ff_dim,
        "hidden_act": TO_HF_ACTIVATION.get(config.activation, "gelu"),
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "type_vocab_size": config.segments,
        "tie_word_embeddings": config.tie != "none" or "lm" not in config.outputs,
    } | ({"id2label": labels, "label2id": {name: int(number) for number, name in labels.items()}} if labels else {})


def renames(config: ModelConfig) -> Renames:
    """Add or remove the prefix, and replace the names of TensorFlow checkpoints."""
    return (
        (r"^(?:bert\.)?(embeddings|encoder|pooler)\.", rf"{_prefix(config)}\1."),
        (r"\.gamma$", ".weight"),
        (r"\.beta$", ".bias"),
        (r"^cls\.predictions\.decoder\.bias$", "cls.predictions.bias"),
    )


BERT = Adapter("BERT", ("bert",), "encoder", table, from_hf, to_hf, renames, (r".*embeddings\.position_ids",))
