"""`/health`: the process is alive. `/ready`: every model ran within the last seconds, or does so now."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from fastapi import APIRouter, Response

from clearhead.config import GenerationConfig
from clearhead.serve.dependencies import Models
from clearhead.serve.errors import ApiError
from clearhead.serve.registry import ServedModel
from clearhead.serve.schemas import Answer

router = APIRouter(tags=["operation"])
PROBE_SECONDS = 5.0  # a probe that is not done by then: not ready


class Health(Answer):
    """The process is alive."""

    status: Literal["ok"] = "ok"


class Readiness(Answer):
    """The state of each model."""

    ready: bool
    models: dict[str, Literal["ready", "busy", "failed"]]


@router.get("/health")
async def health() -> Health:
    """Whether the process is alive; needs no key."""
    return Health()


@router.get("/ready", responses={503: {"model": Readiness}})
async def ready(registry: Models, response: Response) -> Readiness:
    """Whether every model answers: it ran within the last seconds, or makes a token now."""
    states = await asyncio.gather(*(_state(served) for served in registry.models.values()))
    good = not registry.draining and all(state == "ready" for state in states)
    response.status_code = 200 if good else 503
    return Readiness(ready=good, models=dict(zip(registry.models, states, strict=True)))


async def _state(served: ServedModel) -> Literal["ready", "busy", "failed"]:
    if served.generates and (served.engine is None or served.engine.error is not None):
        return "failed"
    if served.last_run and time.monotonic() - served.last_run < served.config.ready_seconds:
        return "ready"
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            if served.generates:
                prompt, source = served.probe()
                request = served.submit(prompt, GenerationConfig(max_new_tokens=1), source=source)
                async for _ in served.follow(request):
                    pass
            else:
                await served.run(served.model.embed, "a", truncate=True)
    except ApiError as error:
        return "busy" if error.status == 429 else "failed"
    except TimeoutError:
        return "failed"
    return "ready"
