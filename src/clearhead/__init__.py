"""The Transformer as one small, fast package: translator, BERT, GPT and Llama by config."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from clearhead.predict import Model

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(name: str | Path, device: str = "auto", dtype: str | None = None, compiled: bool = False) -> Model:
    """A model by its name (`clearhead models` lists them), model folder or run folder, ready to use.

    `compiled` is for decoders on a GPU: some tens of seconds at the first text of each batch size, faster from then on.
    """
    from clearhead.predict import load as load_model  # here, so that `import clearhead` does not wait for torch

    return load_model(name, device, dtype, compiled)
