"""`/v1/fill`, `/v1/classify`, `/v1/tag` and `/v1/answer`: the tasks of encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from clearhead.config.serve import MAX_TOP
from clearhead.serve.dependencies import Limits, Models
from clearhead.serve.inputs import Texts, as_list, paired
from clearhead.serve.registry import ServedModel
from clearhead.serve.sampling_options import ModelName
from clearhead.serve.schemas import Answer, Schema

router = APIRouter(prefix="/v1", tags=["encoders"])


class TaskRequest(Schema):
    """Texts for a model."""

    model: ModelName | None = None
    input: Texts


class TaskAnswer(Answer):
    """One result for each text."""

    object: Literal["list"]
    model: str


class FillRequest(TaskRequest):
    """Texts with masks, written [MASK] or <mask>."""

    top: int = Field(default=5, ge=1, le=MAX_TOP)


class FilledToken(Answer):
    """A token for a mask, and its probability."""

    text: str
    score: float


class FilledMask(Answer):
    """A mask, at these characters, and its tokens, best first."""

    start: int
    end: int
    tokens: list[FilledToken]


class Filled(Answer):
    """The text with the best token in each mask."""

    text: str
    masks: list[FilledMask]


class FillAnswer(TaskAnswer):
    """Filled texts."""

    data: list[Filled]


@router.post("/fill", response_model=FillAnswer)
async def fill(body: FillRequest, registry: Models, limits: Limits) -> Response:
    """Fill every mask."""
    served = registry.get(body.model, "fill")

    def call(texts: list[str]) -> Sequence[Any]:
        return served.model.fill(texts, body.top)

    return await _answer(served, ("fill", body.top), call, as_list(body.input, limits, "input"))


class ClassifyRequest(TaskRequest):
    """Texts, or pairs of texts."""

    pair: Texts | None = None
    truncate: bool = False


class LabelScore(Answer):
    """A label and its probability."""

    name: str
    score: float


class Classified(Answer):
    """The best label and all of them, or the value of a regression model."""

    label: str | None = None
    score: float | None = None
    labels: list[LabelScore] | None = None
    value: float | None = None


class ClassifyAnswer(TaskAnswer):
    """Labels of the texts."""

    data: list[Classified]


@router.post("/classify", response_model=ClassifyAnswer)
async def classify(body: ClassifyRequest, registry: Models, limits: Limits) -> Response:
    """Label texts, or predict a value with a regression model."""
    served = registry.get(body.model, "classify")
    texts = as_list(body.input, limits, "input")
    pairs = [None] * len(texts) if body.pair is None else paired(texts, body.pair, limits, "pair")
    regression = served.model.extra.get("task") == "regression"

    def call(items: list[Any]) -> Sequence[Any]:
        texts, pairs = map(list, zip(*items, strict=True))
        others = None if body.pair is None else pairs
        if regression:
            values = served.model.regress(texts, others, truncate=body.truncate)
            return [{"value": value} for value in values]
        return served.model.classify(texts, others, truncate=body.truncate)

    key = ("classify", body.pair is None, body.truncate)
    return await _answer(served, key, call, list(zip(texts, pairs, strict=True)))


class TagRequest(TaskRequest):
    """Texts whose words are tagged."""

    pretokenized: bool = False  # split words at spaces only
    truncate: bool = False


class Word(Answer):
    """A word at these characters, and its tag."""

    text: str
    start: int
    end: int
    tag: str
    score: float


class TaggedSpan(Answer):
    """Consecutive words of one entity."""

    text: str
    start: int
    end: int
    label: str
    score: float


class Tagged(Answer):
    """A text with its words and the spans that they form."""

    text: str
    words: list[Word]
    spans: list[TaggedSpan]


class TagAnswer(TaskAnswer):
    """Tagged texts."""

    data: list[Tagged]


@router.post("/tag", response_model=TagAnswer)
async def tag(body: TagRequest, registry: Models, limits: Limits) -> Response:
    """Tag the words of texts."""
    served = registry.get(body.model, "tag")

    def call(texts: list[str]) -> Sequence[Any]:
        return served.model.tag(texts, pretokenized=body.pretokenized, truncate=body.truncate)

    key = ("tag", body.pretokenized, body.truncate)
    return await _answer(served, key, call, as_list(body.input, limits, "input"))


class AnswerRequest(Schema):
    """Questions, and a context for each or one for all."""

    model: ModelName | None = None
    question: Texts
    context: Texts
    top: int = Field(default=1, ge=1, le=MAX_TOP)
    require_answer: bool = False
    truncate: bool = False


class FoundAnswer(Answer):
    """A part of the context at these characters; empty if it has no answer."""

    text: str
    start: int
    end: int
    score: float


class BestAnswer(FoundAnswer):
    """The best answer; with top > 1, all of them."""

    candidates: list[FoundAnswer] | None = None


class AnswerList(TaskAnswer):
    """The best answer to each question."""

    data: list[BestAnswer]


@router.post("/answer", response_model=AnswerList)
async def answer(body: AnswerRequest, registry: Models, limits: Limits) -> Response:
    """Find answers in contexts."""
    served = registry.get(body.model, "answer")
    questions = as_list(body.question, limits, "question")
    contexts = paired(questions, body.context, limits, "context")

    def call(items: list[Any]) -> Sequence[Any]:
        questions, contexts = map(list, zip(*items, strict=True))
        return served.model.answer(
            questions, contexts, top=body.top, require_answer=body.require_answer, truncate=body.truncate
        )

    key = ("answer", body.top, body.require_answer, body.truncate)
    return await _answer(served, key, call, list(zip(questions, contexts, strict=True)))


async def _answer(served: ServedModel, key: Any, call: Any, items: list[Any]) -> Response:
    """Run a task in batches with those of other requests."""
    results = await served.batcher.run(key, call, items)
    data = [result if isinstance(result, dict) else result.to_dict() for result in results]
    return JSONResponse({"object": "list", "model": served.name, "data": data})
