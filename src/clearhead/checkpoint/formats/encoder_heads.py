"""The output heads of a BERT-like encoder, which follow from the names of its tensors."""

from collections.abc import Mapping, Set
from typing import Any

from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.config import ModelConfig
from clearhead.errors import UserError

CLASSES = {  # ending of a class of Hugging Face to our outputs
    "Model": (),
    "ForMaskedLM": ("lm",),
    "ForSequenceClassification": ("classes",),
    "ForTokenClassification": ("tags",),
    "ForQuestionAnswering": ("span",),
}


def read_heads(fields: Fields, names: Set[str], prefixes: Mapping[str, str]) -> dict[str, Any]:
    """Return `outputs`, `labels` and `tie`; `prefixes` are those of the tensors of each head."""
    fields.require("multi-label classification", "problem_type", "single_label_classification", "regression")
    fields.ignore("classifier_dropout", "num_labels", "id2label", "label2id")
    outputs = [output for prefix, output in prefixes.items() if any(name.startswith(prefix) for name in names)]
    if "lm" in outputs:
        fields.require("an untied output matrix", "tie_word_embeddings", True)
    fields.ignore("tie_word_embeddings")
    labels = 0
    if {"classes", "tags"} & {*outputs}:
        ids = fields.data.get("id2label")
        labels = len(ids) if isinstance(ids, dict) else fields.integer("num_labels", 2)
    tie = "output" if "lm" in outputs else "none"
    return {"outputs": outputs, "labels": labels, "tie": tie, "output_bias": "lm" in outputs}


def write_heads(config: ModelConfig, prefix: str) -> dict[str, Any]:
    """Return `architectures` and labels for config.json; `prefix` is that of the class."""
    names = [prefix + ending for ending, outputs in CLASSES.items() if outputs == config.outputs]
    if not names:
        raise UserError(f"no Hugging Face class has outputs: {', '.join(config.outputs)}")
    labels = {str(number): f"LABEL_{number}" for number in range(config.labels)}
    settings: dict[str, Any] = {"architectures": names}
    settings["tie_word_embeddings"] = config.tie != "none" or "lm" not in config.outputs
    if labels:
        settings |= {"id2label": labels, "label2id": {name: int(number) for number, name in labels.items()}}
    return settings
