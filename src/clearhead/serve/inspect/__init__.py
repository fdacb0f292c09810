"""/inspect: what happens inside a model, for the page and for programs.

`mount_inspect(app, models)` adds the routes to any FastAPI app; answers with tensors are binary, see `frame`.
"""

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter, FastAPI

from clearhead.errors import UserError
from clearhead.files import read_text
from clearhead.predict import Model
from clearhead.serve.inspect import (
    attention,
    lab_notes,
    models,
    next_token,
    switches,
    tokens,
    translate,
    understand,
)
from clearhead.serve.inspect.explorer import Explorer
from clearhead.serve.inspect.page import TYPES

ROUTERS = (
    models.router,
    tokens.router,
    attention.router,
    next_token.router,
    translate.router,
    switches.router,
    understand.router,
    lab_notes.router,
)


def mount_inspect(app: FastAPI, served: Mapping[str, Model]) -> Explorer:
    """Add /inspect for these models to an app."""
    app.state.explorer = Explorer(served)
    for router in ROUTERS:
        app.include_router(router, prefix="/inspect", tags=["inspect"])
    explorer: Explorer = app.state.explorer
    return explorer


def add_view(app: FastAPI, script: Path, router: APIRouter | None = None) -> None:
    """Add a view of your own to the page: `script` exports `title` and `View`, `router` has the routes it asks."""
    if not script.stem.isidentifier():
        raise UserError(f"{script.name}: the name of a view is letters, digits and _; rename the file")
    app.state.page_files[f"views/{script.stem}.js"] = (read_text(script).encode(), TYPES[".js"])
    app.state.explorer.own_views.append(script.stem)
    if router is not None:
        app.include_router(router, prefix="/inspect", tags=["inspect"])
