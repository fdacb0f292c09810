"""`/v1/chat/completions`: answer conversations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from clearhead.config.serve import MAX_LOGPROBS, MAX_MESSAGES, MAX_NEW_TOKENS, MAX_TEXT_CHARS, ServeLimits
from clearhead.errors import UserError
from clearhead.inference.sampling import sample_seeds
from clearhead.predict.chat import read_messages
from clearhead.predict.requests import generation_config
from clearhead.predict.template import Turn
from clearhead.serve.answers import TextAnswer
from clearhead.serve.dependencies import Limits, Models
from clearhead.serve.errors import ApiError
from clearhead.serve.explain import ALTERNATIVES, ChatLogprobs, Explanation, chat_logprobs, explanation
from clearhead.serve.generation import Generation, NewSequence, Piece
from clearhead.serve.json_schema import ANY_OBJECT, JsonConstraint
from clearhead.serve.registry import ServedModel
from clearhead.serve.sampling_options import SamplingOptions, check_limit
from clearhead.serve.schemas import Answer, Schema, Usage
from clearhead.serve.tokens import check_context

router = APIRouter(prefix="/v1", tags=["generation"])
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]


class TextPart(Schema):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(Schema):
    """A message; `developer` is another name of `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES)]
    name: Annotated[str, Field(max_length=64)] | None = None  # accepted and ignored

    @property
    def text(self) -> str:
        """The parts as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class PlainText(Schema):
    """Any text."""

    type: Literal["text"]


class JsonObject(Schema):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Schema):
    """A JSON schema."""

    name: Annotated[str, Field(max_length=64)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: Annotated[str, Field(max_length=1 << 14)] | None = None
    strict: bool | None = None  # it always is


class JsonSchema(Schema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class ChatRequest(SamplingOptions):
    """A conversation: a system message if there is one, then user and assistant in turn, the user last."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    response_format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] | None = None
    store: Literal[False] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None


class AssistantMessage(Answer):
    """The answer to a conversation."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    explanation: Explanation | None = None


class ChatCompletion(Answer):
    """All answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    seed: int


@router.post("/chat/completions", response_model=ChatCompletion)
async def chat_completions(body: ChatRequest, registry: Models, limits: Limits) -> Response:
    """Answer a conversation; with `stream`, the answer comes as server-sent events."""
    body.check(limits)
    check_limit("top_logprobs", body.top_logprobs or 0, limits.max_logprobs)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs=true", param="top_logprobs")
    served = registry.get(body.model, "chat")
    seed = body.first_seed()
    with served.admission(body.n or 1):
        sequences = await served.run_text(_prepare, served, body, seed, limits)
        generation = Generation(served, sequences, strip=True)
    return await ChatAnswer(served, body, seed).respond(generation)


def _prepare(served: ServedModel, body: ChatRequest, seed: int, limits: ServeLimits) -> list[NewSequence]:
    """Write the conversation as the model's prompt; draws from the seeds that `Model.chat` uses."""
    model = served.model
    system, turns = _read(body.messages)
    prompt = served.prompt_format.prompt(system, turns)
    ids = model.prompt_ids(prompt) if isinstance(prompt, str) else prompt
    new = body.max_completion_tokens or body.max_tokens
    if new is None:
        new = max(1, min(limits.max_new_tokens, model.config.max_positions - len(ids)))
    check_limit("max_tokens", new, limits.max_new_tokens)
    check_context(model, ids, new, limits, "messages")
    options = body.generation_options() | {"max_new_tokens": new}
    if body.logprobs or body.explain:
        options |= {"logprobs": True, "top_logprobs": max(body.top_logprobs or 0, ALTERNATIVES * body.explain)}
    constraint = _constraint(served, body, limits)
    stops = (*served.prompt_format.stops, *body.stops)
    config = generation_config(model, options)
    return [
        NewSequence(ids, config, each, stops=stops, constraint=None if constraint is None else constraint.copy())
        for each in sample_seeds([seed + len(turns)], body.n or 1)
    ]


def _read(messages: list[Message]) -> tuple[str, list[Turn]]:
    """The system text and the turns, the last one without its answer."""
    if messages[-1].role != "user":
        raise ApiError(400, "messages: the last one must be the user's", param="messages")
    written = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.text}
        for message in messages
    ]
    try:
        system, turns = read_messages(written[:-1])
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from None
    return system, [*turns, Turn(messages[-1].text)]


def _constraint(served: ServedModel, body: ChatRequest, limits: ServeLimits) -> JsonConstraint | None:
    if isinstance(body.response_format, JsonSchema):
        return served.grammars.constraint(body.response_format.json_schema.schema_, limits.max_schema_bytes)
    if isinstance(body.response_format, JsonObject):
        return served.grammars.constraint(ANY_OBJECT, limits.max_schema_bytes)
    return None


class ChatAnswer(TextAnswer):
    """How the answers are written."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatRequest

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole answer."""
        return self._shown(piece, {"message": {"role": "assistant", "content": piece.text, "refusal": None}})

    def delta(self, piece: Piece) -> dict[str, Any]:
        """A piece of an answer."""
        return self._shown(piece, {"delta": {"content": piece.text}})

    def first_deltas(self, count: int) -> list[dict[str, Any]]:
        """Who speaks."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [{"index": n, "delta": delta, "logprobs": None, "finish_reason": None} for n in range(count)]

    def _shown(self, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        texts = self.served.token_texts
        logprobs = chat_logprobs(texts, piece, self.body.top_logprobs or 0) if self.body.logprobs else None
        shown = {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return shown | ({"explanation": explanation(texts, piece)} if self.body.explain else {})
