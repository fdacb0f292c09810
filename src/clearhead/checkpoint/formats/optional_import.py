"""Import of optional libraries, with the command that installs a missing one."""

import importlib
from typing import Any

from clearhead.errors import UserError


def import_optional(name: str) -> Any:
    """Import a library of the `interop` extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{package} is missing ({error}); install it with: pip install 'clearhead[interop]'") from None
