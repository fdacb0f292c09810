"""What to train instead of a model that cannot be exported to a format."""

from collections.abc import Sequence
from typing import Any


def train_with(settings: Sequence[str]) -> str:
    """The end of an error message: settings whose model can be exported; nothing if one of them is not known."""
    return f"; a model trained with {' '.join(settings)} can be exported" if settings and all(settings) else ""


def setting(key: str, value: Any) -> str:
    """A model setting as it is given to `clearhead train`."""
    if isinstance(value, tuple):
        value = f"[{','.join(map(str, value))}]" if len(value) != 1 else value[0]
    shown = {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else value
    return f"model.{key}={shown}"
