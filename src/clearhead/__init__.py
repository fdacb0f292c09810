"""The Transformer as one small, fast package: translator, BERT, GPT and Llama by config.

    import clearhead

    model = clearhead.load("en-de")
    print(model.translate("Two dogs are playing in the snow.", beam=4))

Nothing here imports torch before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clearhead.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from clearhead.config.generation import GenerationConfig
    from clearhead.evaluate.api import Evaluation, evaluate
    from clearhead.interpret import Inspection
    from clearhead.predict.chat import Chat
    from clearhead.predict.model import Model
    from clearhead.predict.results import (
        Answer,
        Classification,
        GenerationResult,
        MaskFill,
        Match,
        Tagging,
        Translation,
    )
    from clearhead.train.api import TrainResult, train

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Chat",
    "Classification",
    "Evaluation",
    "GenerationConfig",
    "GenerationResult",
    "Inspection",
    "MaskFill",
    "Match",
    "Model",
    "Tagging",
    "TrainResult",
    "Translation",
    "UserError",
    "__version__",
    "evaluate",
    "load",
    "train",
]
_RESULTS = ("Answer", "Classification", "GenerationResult", "MaskFill", "Match", "Tagging", "Translation")
_MODULES = {  # where each name is defined
    **dict.fromkeys(_RESULTS, "clearhead.predict.results"),
    "Chat": "clearhead.predict.chat",
    "Evaluation": "clearhead.evaluate.api",
    "GenerationConfig": "clearhead.config.generation",
    "Inspection": "clearhead.interpret",
    "Model": "clearhead.predict.model",
    "TrainResult": "clearhead.train.api",
}


def load(name: str | Path, device: str = "auto", dtype: str | None = None, compiled: bool = False) -> Model:
    """Load a model by name (`clearhead models` lists them), model folder or run folder.

    `dtype` is fp32, bf16, fp16, fp64, int8 or int4 (or torch's name); without it, as stored. With `compiled`, a decoder
    on a GPU takes tens of seconds for the first call with each batch size; later calls are faster.
    """
    from clearhead.predict.load import load as load_model

    return load_model(name, device, dtype, compiled)


def __getattr__(name: str) -> Any:
    if name in ("train", "evaluate"):
        return importlib.import_module(f"clearhead.{name}")  # these packages are callable
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
