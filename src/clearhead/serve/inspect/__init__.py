"""/inspect: what happens inside a model, for the page and for programs.

`mount_inspect(app, models)` adds the routes to any FastAPI app; answers with tensors are binary, see `frame`.
"""

from collections.abc import Mapping

from fastapi import FastAPI

from clearhead.predict import Model
from clearhead.serve.inspect import attention, models, next_token, switches, tokens, translate, understand
from clearhead.serve.inspect.explorer import Explorer

ROUTERS = (
    models.router,
    tokens.router,
    attention.router,
    next_token.router,
    translate.router,
    switches.router,
    understand.router,
)


def mount_inspect(app: FastAPI, served: Mapping[str, Model]) -> Explorer:
    """Add /inspect for these models to an app."""
    app.state.explorer = Explorer(served)
    for router in ROUTERS:
        app.include_router(router, prefix="/inspect", tags=["inspect"])
    explorer: Explorer = app.state.explorer
    return explorer
