"""BERT as Hugging Face keeps it, with any of its heads or none (sentence encoders like MiniLM)."""

import re
from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import ACTIVATIONS, Adapter, Renames, spelt
from clearhead.checkpoint.formats.fields import Fields
from clearhead.checkpoint.formats.tables import Table, under
from clearhead.config import ModelConfig
from clearhead.errors import UserError

CLASSES = {  # the outputs that each class has
    "BertModel": (),
    "BertForMaskedLM": ("lm",),
    "BertForNextSentencePrediction": ("next-sentence",),
    "BertForPreTraining": ("lm", "next-sentence"),
    "BertForSequenceClassification": ("classes",),
    "BertForTokenClassification": ("tags",),
    "BertForQuestionAnswering": ("span",),
}
LAYER: Table = {
    "attention.query.*": "attention.self.query.*",
    "attention.key.*": "attention.self.key.*",
    "attention.value.*": "attention.self.value.*",
    "attention.output.*": "attention.output.dense.*",
    "attention_norm.*": "attention.output.LayerNorm.*",
    "feed_forward.up.*": "intermediate.dense.*",
    "feed_forward.down.*": "output.dense.*",
    "feed_forward_norm.*": "output.LayerNorm.*",
}
EMBEDDING: Table = {
    "tokens.weight": "word_embeddings.weight",
    "positions.weight": "position_embeddings.weight",
    "segments.weight": "token_type_embeddings.weight",
    "norm.*": "LayerNorm.*",
}


def table(config: ModelConfig) -> Table:
    """The names of a model with these outputs."""
    prefix = _prefix(config)
    return {
        **under("encoder.embedding", f"{prefix}embeddings", EMBEDDING),
        **under("encoder.layers.*", f"{prefix}encoder.layer.*", LAYER),
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
    return "bert." if config.outputs else ""  # a model without a head stands at the root


def ours(fields: Fields, names: Set[str]) -> ModelConfig:
    """Which heads there are follows from the tensors: published files often hold more, or less, than their class."""
    fields.must("an encoder that looks back only", "is_decoder", False)
    fields.must("cross-attention", "add_cross_attention", False)
    fields.must("relative positions", "position_embedding_type", "absolute")
    fields.must("several labels at once", "problem_type", "single_label_classification", "regression")
    fields.ignore("classifier_dropout", "gradient_checkpointing", "num_labels", "id2label", "label2id")
    outputs = [name for tensor, name in _OUTPUTS.items() if any(each.startswith(tensor) for each in names)]
    labels = 0
    if any(each.startswith("classifier.") for each in names):
        kind = next((CLASSES[name] for name in fields.texts("architectures") if name in CLASSES), ())
        if kind not in (("classes",), ("tags",)):
            raise UserError(f"{fields.where}: architectures: a classifier of which kind? name the class")
        outputs.append(kind[0])
        given = fields.data.get("id2label")
        labels = len(given) if isinstance(given, dict) else fields.whole("num_labels", 2)
    if "lm" in outputs:
        fields.must("an output matrix of its own", "tie_word_embeddings", True)
    fields.ignore("tie_word_embeddings")
    pooler = any(re.match(r"(bert\.)?pooler\.", each) for each in names)
    if "classes" in outputs and not pooler:
        raise UserError(f"{fields.where}: classes without a pooler cannot be represented in BERT")
    settings: dict[str, Any] = {
        "family": "encoder",
        "encoder_layers": fields.whole("num_hidden_layers"),
        "dim": fields.whole("hidden_size"),
        "heads": fields.whole("num_attention_heads"),
        "ff_dim": fields.whole("intermediate_size"),
        "activation": spelt(fields, "hidden_act", "gelu"),
        "norm_position": "post",
        "norm_eps": fields.number("layer_norm_eps", 1e-12),
        "dropout": fields.number("hidden_dropout_prob", 0.1),
        "attention_dropout": fields.number("attention_probs_dropout_prob", 0.1),
        "position": "learned",
        "max_positions": fields.whole("max_position_embeddings"),
        "vocab_size": fields.whole("vocab_size"),
        "segments": fields.whole("type_vocab_size", 2),
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


def theirs(config: ModelConfig) -> dict[str, Any]:
    """The same in their words."""
    names = [name for name, outputs in CLASSES.items() if outputs == config.outputs]
    if not names:
        raise UserError(f"no class there has outputs: {', '.join(config.outputs)} together")
    if not config.segments:
        raise UserError("segments is 1 or more there, 0 here")
    if config.pooling != "cls" and config.pooler:
        raise UserError(f"pooling is that of the first token there, {config.pooling} here")
    labels = {str(number): f"LABEL_{number}" for number in range(config.labels)}
    return {
        "architectures": names,
        "model_type": "bert",
        "num_hidden_layers": config.encoder_layers,
        "hidden_size": config.dim,
        "num_attention_heads": config.heads,
        "intermediate_size": config.ff_dim,
        "hidden_act": ACTIVATIONS.get(config.activation, "gelu"),
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "type_vocab_size": config.segments,
        "tie_word_embeddings": config.tie != "none" or "lm" not in config.outputs,
    } | ({"id2label": labels, "label2id": {name: int(number) for number, name in labels.items()}} if labels else {})


def renames(config: ModelConfig) -> Renames:
    """With the prefix or without, and the names of the first TensorFlow files."""
    return (
        (r"^(?:bert\.)?(embeddings|encoder|pooler)\.", rf"{_prefix(config)}\1."),
        (r"\.gamma$", ".weight"),
        (r"\.beta$", ".bias"),
        (r"^cls\.predictions\.decoder\.bias$", "cls.predictions.bias"),
    )


BERT = Adapter("BERT", ("bert",), "encoder", table, ours, theirs, renames, (r".*embeddings\.position_ids",))
