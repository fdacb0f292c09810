"""A loaded model and texts to answers: what `clearhead.load` returns."""

from clearhead.predict.batch_generate import engine_for, generate_batch_texts, submit
from clearhead.predict.chat import Chat
from clearhead.predict.find import find_model
from clearhead.predict.model import Model, load

__all__ = ["Chat", "Model", "engine_for", "find_model", "generate_batch_texts", "load", "submit"]
