"""A loaded model and texts to typed results: what `clearhead.load` returns."""

from clearhead.predict.batch_generate import ModelEngine, engine_for, generate_batch_texts, submit
from clearhead.predict.chat import Chat
from clearhead.predict.find import find_model
from clearhead.predict.load import load
from clearhead.predict.model import Model
from clearhead.predict.results import (
    Alignment,
    Answer,
    Classification,
    GenerationResult,
    Label,
    MaskFill,
    MaskPrediction,
    MaskToken,
    Match,
    Span,
    TaggedWord,
    Tagging,
    Translation,
)

__all__ = [
    "Alignment",
    "Answer",
    "Chat",
    "Classification",
    "GenerationResult",
    "Label",
    "MaskFill",
    "MaskPrediction",
    "MaskToken",
    "Match",
    "Model",
    "ModelEngine",
    "Span",
    "TaggedWord",
    "Tagging",
    "Translation",
    "engine_for",
    "find_model",
    "generate_batch_texts",
    "load",
    "submit",
]
