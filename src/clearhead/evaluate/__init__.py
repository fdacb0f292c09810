"""Evaluation metrics: BLEU, chrF, accuracy, F1, correlations, SQuAD scores."""

import sys
from types import ModuleType
from typing import Any

from clearhead.evaluate.bleu import CorpusScore, bleu, chrf, tokenized_bleu
from clearhead.evaluate.classification_metrics import (
    F1,
    AnswerScores,
    EntityScores,
    accuracy,
    binary_f1,
    confusion_matrix,
    entity_f1,
    macro_f1,
    matthews_corrcoef,
    squad_scores,
)
from clearhead.text.correlation import pearson, spearman
from clearhead.text.entities import entities

__all__ = [
    "F1",
    "AnswerScores",
    "CorpusScore",
    "EntityScores",
    "accuracy",
    "binary_f1",
    "bleu",
    "chrf",
    "confusion_matrix",
    "entities",
    "entity_f1",
    "macro_f1",
    "matthews_corrcoef",
    "pearson",
    "spearman",
    "squad_scores",
    "tokenized_bleu",
]


class _Package(ModuleType):
    """Importing any module of this package binds it as `clearhead.evaluate`, so the package itself is the function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from clearhead.evaluate.api import evaluate

        return evaluate(*args, **options)


sys.modules[__name__].__class__ = _Package
