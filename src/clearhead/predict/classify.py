"""A label with its probability, or a number, for a text or for two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from clearhead.errors import UserError
from clearhead.model import Documents
from clearhead.predict.encode_batch import head, label_names, read, rows

if TYPE_CHECKING:
    from clearhead.predict.model import Model


class Label(NamedTuple):
    """A label, and how probable it is."""

    name: str
    score: float


def classify(
    model: Model, texts: Sequence[str], seconds: Sequence[str] | None = None, cut: bool = False
) -> list[list[Label]]:
    """All labels of each text (or pair), the best first."""
    if model.extra.get("task") == "regression":
        raise UserError(f"classify: {model.name or 'this model'} gives a number, no labels; ask for its values")
    found = _scores(model, texts, seconds, cut)
    names = label_names(model, model.config.labels)
    return [
        sorted((Label(*pair) for pair in zip(names, row.softmax(-1).tolist(), strict=True)), key=lambda x: -x.score)
        for row in found
    ]


def regress(model: Model, texts: Sequence[str], seconds: Sequence[str] | None = None, cut: bool = False) -> list[float]:
    """The number that a model of a regression gives for each text (or pair)."""
    if model.extra.get("task") != "regression":
        raise UserError(f"values: {model.name or 'this model'} gives no numbers; it was not made for regression")
    return [float(row[0]) for row in _scores(model, texts, seconds, cut)]


def _scores(model: Model, texts: Sequence[str], seconds: Sequence[str] | None, cut: bool) -> list[Tensor]:
    """The scores of each text's labels: (C,) each."""
    classes = head(model, "classes", "classify", "classification")
    if model.data is not None and model.data.text_pairs != (seconds is not None):
        told = "two texts; give the second, too" if model.data.text_pairs else "one text; leave the second out"
        raise UserError(f"classify: {model.name or 'this model'} reads {told}")
    pool = model.inference_network.heads.pool

    def each(hidden: Tensor, documents: Documents, chosen: list[int]) -> list[Tensor]:
        return list(classes(pool(hidden, None, documents)).float().cpu())

    return read(model, rows(model, texts, seconds, cut=cut), each)
