"""`/v1/models`: what is served."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter

from clearhead.serve.dependencies import Models
from clearhead.serve.registry import ServedModel
from clearhead.serve.schemas import Answer

router = APIRouter(prefix="/v1", tags=["models"])


class ModelCard(Answer):
    """A served model: OpenAI's fields, and what it can do."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "clearhead"
    family: str
    commands: list[str]
    max_positions: int


class ModelList(Answer):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/models")
async def models(registry: Models) -> ModelList:
    """List the served models."""
    return ModelList(data=[_card(served) for served in registry.models.values()])


@router.get("/models/{name:path}")
async def model(name: str, registry: Models) -> ModelCard:
    """Describe one model."""
    return _card(registry.get(name))


def _card(served: ServedModel) -> ModelCard:
    return ModelCard(
        id=served.name,
        created=served.created,
        family=served.model.config.family,
        commands=served.offered,
        max_positions=served.model.config.max_positions,
    )
