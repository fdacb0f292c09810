"""Libraries that only some formats need, imported when they are; where one is missing, how to get it."""

import importlib
from typing import Any

from clearhead.errors import UserError


def library(name: str) -> Any:
    """A library of the `interop` extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{package} is missing ({error}); install it with: pip install 'clearhead[interop]'") from None
