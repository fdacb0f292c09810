"""Training: loop, objective, losses, optimizers, distributed, run log. Callable: `clearhead.train(recipe)`."""

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """Importing any module of this package binds it as `clearhead.train`, so the package itself is the function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from clearhead.train.api import train

        return train(*args, **options)


sys.modules[__name__].__class__ = _Package
