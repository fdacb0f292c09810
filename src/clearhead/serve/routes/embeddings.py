"""`/v1/embeddings` as OpenAI has it, and `/v1/similar`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from clearhead.config.serve import MAX_TOP
from clearhead.predict.embed import nearest
from clearhead.predict.encode_batch import rows
from clearhead.predict.model import Model
from clearhead.serve.dependencies import Limits, Models
from clearhead.serve.errors import ApiError
from clearhead.serve.inputs import TextList, Texts, as_list
from clearhead.serve.registry import ServedModel
from clearhead.serve.sampling_options import ModelName
from clearhead.serve.schemas import Answer, Schema

router = APIRouter(prefix="/v1", tags=["encoders"])


class EmbeddingRequest(Schema):
    """Texts to embed."""

    model: ModelName | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(default=None, ge=1, le=1 << 20)
    user: Annotated[str, Field(max_length=512)] | None = None  # accepted and ignored
    truncate: bool = False


class Embedding(Answer):
    """The vector of one text: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answer):
    """All vectors, of norm 1."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


@router.post("/embeddings", response_model=EmbeddingList)
async def embeddings(body: EmbeddingRequest, registry: Models, limits: Limits) -> Response:
    """Embed texts."""
    texts = as_list(body.input, limits, "input")
    served = registry.get(body.model, "embed")
    dim = served.model.config.dim
    if body.dimensions not in (None, dim):
        raise ApiError(400, f"dimensions: this model's vectors have {dim}; leave it out", param="dimensions")
    found = await _embed(served, texts, body.truncate)
    tokens = sum(count for _, count in found)
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if body.encoding_format == "base64"
            else vector.tolist(),
        }
        for index, (vector, _) in enumerate(found)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "model": served.name, "data": data, "usage": usage})


class SimilarRequest(Schema):
    """Queries, and the texts to rank for each."""

    model: ModelName | None = None
    query: Texts
    texts: TextList
    top: int = Field(default=5, ge=1, le=MAX_TOP)
    truncate: bool = False


class Similar(Answer):
    """A text, its place in the list, and its cosine similarity."""

    text: str
    index: int
    score: float


class SimilarList(Answer):
    """For each query its nearest texts, best first."""

    object: Literal["list"]
    model: str
    data: list[list[Similar]]


@router.post("/similar", response_model=SimilarList)
async def similar(body: SimilarRequest, registry: Models, limits: Limits) -> Response:
    """Rank texts by their similarity to queries."""
    queries, texts = as_list(body.query, limits, "query"), as_list(body.texts, limits, "texts")
    served = registry.get(body.model, "embed")
    vectors = [vector for vector, _ in await _embed(served, [*queries, *texts], body.truncate)]
    matches = await served.run_text(_rank, vectors[: len(queries)], vectors[len(queries) :], texts, body.top)
    data = [[match.to_dict() for match in row] for row in matches]
    return JSONResponse({"object": "list", "model": served.name, "data": data})


def _rank(queries: list[Any], vectors: list[Any], texts: list[str], top: int) -> list[list[Any]]:
    return nearest(np.stack(queries), np.stack(vectors), texts, top)


async def _embed(served: ServedModel, texts: list[str], truncate: bool) -> list[tuple[Any, int]]:
    """The vector of each text and its number of tokens."""

    def call(texts: list[str]) -> Sequence[Any]:
        return embed_counted(served.model, texts, truncate)

    return await served.batcher.run(("embed", truncate), call, texts)


def embed_counted(model: Model, texts: list[str], truncate: bool) -> list[tuple[Any, int]]:
    """Vectors as `Model.embed` gives them, and the number of tokens that were read for each."""
    vectors = model.embed(texts, truncate=truncate)
    return list(zip(vectors, [len(row.ids) for row in rows(model, texts, truncate=truncate)], strict=True))
