"""A loaded model and texts to answers: what `clearhead.load` returns."""

from clearhead.predict.find import find_model
from clearhead.predict.model import Model, load

__all__ = ["Model", "find_model", "load"]
