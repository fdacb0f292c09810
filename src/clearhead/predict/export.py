"""A loaded model back to disk: as a model folder, or for another library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.checkpoint import LoadedModel, save_model
from clearhead.checkpoint.formats import EXPORTS, export_model
from clearhead.config.settings import nearest
from clearhead.errors import UserError
from clearhead.inference.optimize import is_quantized

if TYPE_CHECKING:
    from clearhead.predict.model import Model


def save(model: Model, folder: Path) -> None:
    """Write a model folder."""
    require_unquantized(model, "save")
    save_model(folder, model.network, model.own_tokenizers, model.extra)


def export(model: Model, folder: Path, to: str) -> None:
    """Write the model for another library into a new folder."""
    if not isinstance(to, str) or to not in EXPORTS:
        raise UserError(f"to: {to!r:.40} is not allowed{nearest(str(to), list(EXPORTS))}")
    require_unquantized(model, "export")
    export_model(LoadedModel(model.network, model.config, model.own_tokenizers, model.extra), folder, to)


def require_unquantized(model: Model, command: str) -> None:
    """Refuse a model that keeps quantized weights only."""
    if is_quantized(model.network):
        raise UserError(f"{command}: {model.label} was loaded with quantized weights only; load it without dtype")
