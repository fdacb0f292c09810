"""`/translate`, `/languages` and `/detect` as LibreTranslate has them: JSON or forms; and our options."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationError

from clearhead.config.serve import MAX_BEAM, MAX_TOP
from clearhead.inference.alignment import alignment_weights
from clearhead.model import EncoderDecoder
from clearhead.predict.align import align_words, alignment_heads
from clearhead.predict.requests import PreparedRequest, requests
from clearhead.serve.dependencies import Limits, Models
from clearhead.serve.errors import ApiError
from clearhead.serve.explain import ALTERNATIVES, Explanation, explanation
from clearhead.serve.generation import Generation, NewSequence, Piece
from clearhead.serve.inputs import Texts, as_list
from clearhead.serve.languages import NAMES, Detector, find_translator, translators
from clearhead.serve.registry import Registry, ServedModel
from clearhead.serve.sampling_options import ModelName, check_limit
from clearhead.serve.schemas import Answer, Schema

router = APIRouter(tags=["translation"])
Code = Annotated[str, Field(min_length=1, max_length=32)]
S = TypeVar("S", bound=Schema)


class TranslateRequest(Schema):
    """Texts to translate; each line of a text by itself."""

    q: Texts
    source: Code = Field(default="auto", description="A language of /languages, or auto.")
    target: Code
    format: Literal["text"] = "text"
    alternatives: int = Field(default=0, ge=0, le=MAX_TOP)
    api_key: Annotated[str, Field(max_length=512)] | None = None

    model: ModelName | None = None
    beam: int = Field(default=1, ge=1, le=MAX_BEAM)
    explain: bool = False


class DetectRequest(Schema):
    """A text whose language is to be told."""

    q: Annotated[str, Field(min_length=1, max_length=1 << 20)]
    api_key: Annotated[str, Field(max_length=512)] | None = None


class Detected(Answer):
    """A language, and how sure it is, in percent."""

    confidence: float
    language: str


class AlignmentAnswer(Answer):
    """Words of a line and of its translation; links are pairs (source word, target word)."""

    source: list[str]
    target: list[str]
    links: list[list[int]]
    weights: list[list[float]]


class ExplainedLine(Explanation):
    """A line: the alternatives of each token, and the alignment of its words."""

    alignment: AlignmentAnswer


class TranslateAnswer(Answer):
    """A translation for one text, lists for a list."""

    translatedText: str | list[str]
    detectedLanguage: Detected | list[Detected] | None = None
    alternatives: list[str] | list[list[str]] | None = None
    explanation: list[ExplainedLine] | list[list[ExplainedLine]] | None = None


class LanguageAnswer(Answer):
    """A source language and what it can be translated to."""

    code: str
    name: str
    targets: list[str]


def form_body(schema: type[Schema]) -> dict[str, Any]:
    """The OpenAPI description of a body that is JSON or a form."""
    described = schema.model_json_schema()
    kinds = ("application/json", "application/x-www-form-urlencoded")
    return {"requestBody": {"required": True, "content": {kind: {"schema": described} for kind in kinds}}}


@router.get("/languages", response_model=list[LanguageAnswer])
async def languages(registry: Models) -> Response:
    """List the languages that are served."""
    targets: dict[str, set[str]] = {}
    for each in translators(registry):
        for source in each.sources:
            targets.setdefault(source, set()).update(set(each.targets) - {source})
    return JSONResponse(
        [{"code": code, "name": NAMES.get(code, code), "targets": sorted(found)} for code, found in targets.items()]
    )


@router.post("/detect", response_model=list[Detected], openapi_extra=form_body(DetectRequest))
async def detect(request: Request, registry: Models) -> Response:
    """Tell the language of a text, among the source languages that are served."""
    body = await read_form(request, DetectRequest)
    [found] = await _detect(request, registry, [body.q])
    return JSONResponse([_percent(*each) for each in found])


@router.post("/translate", response_model=TranslateAnswer, openapi_extra=form_body(TranslateRequest))
async def translate(request: Request, registry: Models, limits: Limits) -> Response:
    """Translate texts."""
    body = await read_form(request, TranslateRequest)
    texts = as_list(body.q, limits, "q")
    beam = max(body.beam, body.alternatives + 1 if body.alternatives else 1)
    check_limit("beam" if body.beam >= beam else "alternatives", beam, limits.max_beam)
    detected: list[tuple[str, float]] = []
    if body.source == "auto":
        detected = [found[0] for found in await _detect(request, registry, texts)]
    sources = [code for code, _ in detected] or [body.source] * len(texts)
    lines = [(number, line) for number, text in enumerate(texts) for line in text.split("\n")]
    check_limit("q", len(lines), limits.max_batch_items)
    results: list[list[Line]] = [[] for _ in texts]
    for source in dict.fromkeys(sources):
        found = find_translator(registry, body.model, source, body.target)
        chosen = [(number, line) for number, line in lines if sources[number] == source]
        options = found.options(source, body.target)
        translated = await _translate(found.served, [line for _, line in chosen], options, beam, body)
        for (number, _), result in zip(chosen, translated, strict=True):
            results[number].append(result)
    answer: dict[str, Any] = {"translatedText": ["\n".join(line.texts[0] for line in rows) for rows in results]}
    if detected:
        answer["detectedLanguage"] = [_percent(*each) for each in detected]
    if body.alternatives:
        answer["alternatives"] = [_alternatives(rows, body.alternatives) for rows in results]
    if body.explain:
        answer["explanation"] = [[line.explanation for line in rows if line.explanation] for rows in results]
    return JSONResponse({key: value[0] for key, value in answer.items()} if isinstance(body.q, str) else answer)


class Line(NamedTuple):
    """The translations of a line, best first."""

    texts: list[str]
    explanation: dict[str, Any] | None = None


async def _translate(
    served: ServedModel, lines: list[str], options: dict[str, Any], beam: int, body: TranslateRequest
) -> list[Line]:
    """Translate lines: greedily in the engine, with beam search in batches of its own."""
    if beam > 1 and not body.explain:
        search = options | {"beam": beam, "n_best": beam if body.alternatives else 1}

        def call(lines: list[str]) -> Sequence[Any]:
            return served.model.translate(lines, **search)

        results = await served.batcher.run(("translate", *search.items()), call, lines)
        return [Line([candidate.text for candidate in result.candidates]) for result in results]
    more = {"logprobs": True, "top_logprobs": ALTERNATIVES} if body.explain else {}
    with served.admission(len(lines)):
        prepared = await served.run_text(requests, served.model, lines, options | more)
        sequences = [NewSequence(each.prompt, each.config, 0, each.source) for each in prepared if each.source]
        generation = Generation(served, sequences) if sequences else None
    pieces = iter([] if generation is None else await generation.finish())
    translated = []
    for line, each in zip(lines, prepared, strict=True):
        if not each.source:  # an empty line stays empty
            translated.append(Line([""]))
            continue
        piece = next(pieces)
        shown = await served.run(_explain, served, line, each, piece) if body.explain else None
        translated.append(Line([piece.text], shown))
    return translated


def _explain(served: ServedModel, line: str, request: PreparedRequest, piece: Piece) -> dict[str, Any]:
    """The alternatives of each token, and the alignment of the words."""
    model = served.model
    assert isinstance(model.network, EncoderDecoder)
    assert request.source is not None
    weights = alignment_weights(model.network, request.source, request.prompt, piece.ids, alignment_heads(model))
    start = len(request.prompt) - 1  # a language token that the decoder is given is not part of the text
    aligned = align_words(model, line, piece.ids, weights[start:])
    return {**explanation(served.token_texts, piece), "alignment": aligned.to_dict()}


def _alternatives(rows: list[Line], count: int) -> list[str]:
    """Further translations of a text: of each line the next best, or the best where there are no more."""
    return [
        "\n".join(line.texts[number] if number < len(line.texts) else line.texts[0] for line in rows)
        for number in range(1, 1 + min(count, max(len(line.texts) for line in rows) - 1))
    ]


async def _detect(request: Request, registry: Registry, texts: list[str]) -> list[list[tuple[str, float]]]:
    """The languages of texts, best first."""
    state = request.app.state
    if not hasattr(state, "detector"):
        state.detector = Detector([source for each in translators(registry) for source in each.sources])
    detector: Detector = state.detector
    if not detector.languages:
        raise ApiError(404, "no served model translates", code="model_not_found")
    return await asyncio.to_thread(lambda: [detector.detect(text) for text in texts])


def _percent(code: str, score: float) -> dict[str, Any]:
    return {"confidence": round(100 * score, 1), "language": code}


async def read_form(request: Request, schema: type[S]) -> S:
    """A body that is JSON or a form, checked."""
    content = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "application/x-www-form-urlencoded":
            fields = dict(parse_qsl(content.decode(), keep_blank_values=True, max_num_fields=100))
            return schema.model_validate_strings(fields)
        if kind != "application/json":
            raise ApiError(415, "send application/json or application/x-www-form-urlencoded")
        return schema.model_validate(json.loads(content))
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is neither valid JSON nor a valid form") from None
