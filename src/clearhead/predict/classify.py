"""Labels with probabilities, or a number, for a text or a pair of texts.   C labels"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from clearhead.errors import UserError
from clearhead.model import Documents
from clearhead.predict.encode_batch import encode_packed, get_head, label_names, rows
from clearhead.predict.results import Classification, Label

if TYPE_CHECKING:
    from clearhead.predict.model import Model


def classify(
    model: Model, texts: Sequence[str], text_pairs: Sequence[str] | None = None, truncate: bool = False
) -> list[Classification]:
    """The labels of each text (or pair), best first."""
    if model.extra.get("task") == "regression":
        raise UserError(f"classify: {model.label} is a regression model without labels; use regress")
    names = label_names(model, model.config.labels)
    results = []
    for logits in _logits(model, texts, text_pairs, truncate):
        pairs = zip(names, logits.softmax(-1).tolist(), strict=True)
        labels = tuple(sorted((Label(*pair) for pair in pairs), key=lambda label: -label.score))
        results.append(Classification(labels[0].name, labels[0].score, labels))
    return results


def regress(
    model: Model, texts: Sequence[str], text_pairs: Sequence[str] | None = None, truncate: bool = False
) -> list[float]:
    """The value that a regression model predicts for each text (or pair)."""
    if model.extra.get("task") != "regression":
        raise UserError(f"regress: {model.label} is not a regression model; train one with data.task=regression")
    return [float(row[0]) for row in _logits(model, texts, text_pairs, truncate)]


def _logits(model: Model, texts: Sequence[str], text_pairs: Sequence[str] | None, truncate: bool) -> list[Tensor]:
    """The logits of each text: (C,) each."""
    classes = get_head(model, "classes", "classify", "classification")
    if model.data is not None and model.data.text_pairs != (text_pairs is not None):
        expected = "two texts; give the second, too" if model.data.text_pairs else "one text; leave the second out"
        raise UserError(f"classify: {model.label} reads {expected}")
    pool = model.inference_network.heads.pool

    def predict(hidden: Tensor, documents: Documents, numbers: list[int]) -> list[Tensor]:
        return list(classes(pool(hidden, None, documents)).float().cpu())

    return encode_packed(model, rows(model, texts, text_pairs, truncate=truncate), predict)
