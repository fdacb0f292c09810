"""The application: routes, middleware and the models behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from clearhead.config.serve import ServeConfig
from clearhead.predict.model import Model
from clearhead.serve import errors, openapi
from clearhead.serve.inspect import mount_inspect
from clearhead.serve.inspect.page import mount_page
from clearhead.serve.keys import Keys
from clearhead.serve.middleware import AccessLog, Bounds, Guard
from clearhead.serve.registry import Registry
from clearhead.serve.routes import chat, completions, embeddings, health, models, tasks, translate
from clearhead.serve.schemas import Error


def create_app(models_: Mapping[str, Model], config: ServeConfig | None = None, keys: Keys | None = None) -> FastAPI:
    """The server of some models by name; `app.state.registry` has them, `app.state.keys` can be reloaded."""
    config, keys = config or ServeConfig(), keys or Keys()
    registry = Registry(models_, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await registry.start()
        yield
        await registry.close()

    app = FastAPI(
        title="Clearhead",
        description="Every model and task of one process: OpenAI's and LibreTranslate's routes, and our own.",
        version="1",
        lifespan=lifespan,
        docs_url=None,  # from a content delivery network; ours come from the package
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": {"model": Error, "description": "An error"}},
    )
    app.state.registry, app.state.config, app.state.keys = registry, config, keys
    app.state.is_full = lambda: False  # set by the server

    def unavailable() -> str | None:
        if registry.draining:
            return "the server is shutting down"
        return "too many connections; try again" if app.state.is_full() else None

    errors.install(app)
    for group in (health, models, completions, chat, embeddings, tasks, translate):
        app.include_router(group.router)
    app.include_router(openapi.router)
    mount_inspect(app, models_)
    mount_page(app)
    # The last one added is the first to see a request.
    app.add_middleware(Bounds, config=config)
    app.add_middleware(Guard, config=config, keys=keys, unavailable=unavailable)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(AccessLog, observe=registry.metrics.observe, log_texts=config.log_texts)
    return app
