"""What routes get from the application."""

from typing import Annotated

from fastapi import Depends, Request

from clearhead.config.serve import ServeLimits
from clearhead.serve.registry import Registry


async def _registry(request: Request) -> Registry:
    found: Registry = request.app.state.registry
    return found


async def _limits(request: Request) -> ServeLimits:
    limits: ServeLimits = request.app.state.config.limits
    return limits


Models = Annotated[Registry, Depends(_registry)]
Limits = Annotated[ServeLimits, Depends(_limits)]
