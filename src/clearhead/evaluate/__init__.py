"""Answers to scores: translations, classes, values, tags and answers beside what was expected."""

from clearhead.evaluate.bleu import Score, bleu, chrf, tokenized_bleu
from clearhead.evaluate.classification_metrics import (
    F1,
    Answers,
    Entities,
    accuracy,
    answers,
    binary_f1,
    confusion,
    entity_f1,
    macro_f1,
    matthews,
    micro_f1,
)
from clearhead.text.correlation import pearson, spearman
from clearhead.text.entities import entities

__all__ = [
    "F1",
    "Answers",
    "Entities",
    "Score",
    "accuracy",
    "answers",
    "binary_f1",
    "bleu",
    "chrf",
    "confusion",
    "entities",
    "entity_f1",
    "macro_f1",
    "matthews",
    "micro_f1",
    "pearson",
    "spearman",
    "tokenized_bleu",
]
