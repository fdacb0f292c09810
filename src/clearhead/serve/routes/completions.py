"""`/v1/completions`: continue prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from clearhead.config.serve import MAX_BATCH_ITEMS, MAX_LOGPROBS, MAX_NEW_TOKENS, MAX_TEXT_CHARS, ServeLimits
from clearhead.inference.sampling import sample_seeds
from clearhead.predict.requests import generation_config
from clearhead.serve.answers import TextAnswer
from clearhead.serve.dependencies import Limits, Models
from clearhead.serve.explain import ALTERNATIVES, CompletionLogprobs, Explanation, completion_logprobs, explanation
from clearhead.serve.generation import Generation, NewSequence, Piece
from clearhead.serve.registry import ServedModel
from clearhead.serve.sampling_options import SamplingOptions, check_limit
from clearhead.serve.schemas import Answer, Usage
from clearhead.serve.tokens import check_context, prompt_ids

router = APIRouter(prefix="/v1", tags=["generation"])
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Id = Annotated[int, Field(ge=0, lt=1 << 24)]
Ids = Annotated[list[Id], Field(min_length=1, max_length=1 << 20)]


class CompletionRequest(SamplingOptions):
    """Prompts to continue: texts, or token ids that are used as they are."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_BATCH_ITEMS)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_BATCH_ITEMS)]
    )
    max_tokens: int | None = Field(default=16, ge=1, le=MAX_NEW_TOKENS)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1, le=1)
    echo: Literal[False] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class Choice(Answer):
    """One text."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    explanation: Explanation | None = None


class Completion(Answer):
    """All texts; the choices of prompt i have the indices i·n to i·n + n - 1."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    seed: int


@router.post("/completions", response_model=Completion)
async def completions(body: CompletionRequest, registry: Models, limits: Limits) -> Response:
    """Continue prompts; with `stream`, the texts come as server-sent events."""
    prompts = body.prompts
    body.check(limits, len(prompts))
    check_limit("prompt", len(prompts), limits.max_batch_items)
    check_limit("max_tokens", body.max_tokens or 0, limits.max_new_tokens)
    check_limit("logprobs", body.logprobs or 0, limits.max_logprobs)
    served = registry.get(body.model, "generate")
    seed = body.first_seed()
    with served.admission(len(prompts) * (body.n or 1)):
        sequences = await served.run_text(_prepare, served, body, prompts, seed, limits)
        generation = Generation(served, sequences)
    return await CompletionAnswer(served, body, seed).respond(generation)


def _prepare(
    served: ServedModel, body: CompletionRequest, prompts: list[Any], seed: int, limits: ServeLimits
) -> list[NewSequence]:
    """Tokenize the prompts, and give each sample its seed."""
    rows = [prompt if isinstance(prompt, list) else prompt_ids(served.model, prompt) for prompt in prompts]
    new = body.max_tokens or 16
    for row in rows:
        check_context(served.model, row, new, limits)
    options = body.generation_options() | {"max_new_tokens": new}
    if body.logprobs is not None or body.explain:
        options |= {"logprobs": True, "top_logprobs": max(body.logprobs or 0, ALTERNATIVES * body.explain)}
    config = generation_config(served.model, options)
    n = body.n or 1
    seeds = sample_seeds([seed + number for number in range(len(rows))], n)
    return [
        NewSequence(row, config, seeds[number * n + sample], stops=body.stops)
        for number, row in enumerate(rows)
        for sample in range(n)
    ]


class CompletionAnswer(TextAnswer):
    """How the texts are written."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body: CompletionRequest

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A text, or a piece of one."""
        texts, count = self.served.token_texts, self.body.logprobs
        shown = {
            "text": piece.text,
            "index": piece.index,
            "logprobs": None if count is None else completion_logprobs(texts, piece, count),
            "finish_reason": piece.finish_reason,
        }
        return shown | ({"explanation": explanation(texts, piece)} if self.body.explain else {})
