"""How tokens are shown: OpenAI's two forms of logprobs, and our `explanation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.serve.generation import Piece
from clearhead.serve.schemas import Answer
from clearhead.serve.token_text import TokenTexts

ALTERNATIVES = 5  # per token of an explanation


class CompletionLogprobs(Answer):
    """Logprobs of `/v1/completions`."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TopLogprob(Answer):
    """A likely token of `/v1/chat/completions`."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A generated token of `/v1/chat/completions`, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Logprobs of `/v1/chat/completions`."""

    content: list[TokenLogprob]
    refusal: None = None


class Alternative(Answer):
    """A token that could have come."""

    id: int
    text: str
    logprob: float


class ExplainedToken(Alternative):
    """A generated token with the most likely ones in its place."""

    alternatives: list[Alternative]


class Explanation(Answer):
    """Why a text came out as it did."""

    tokens: list[ExplainedToken]


def completion_logprobs(texts: TokenTexts, piece: Piece, count: int) -> dict[str, Any]:
    """Logprobs of `/v1/completions`; `count` most likely tokens each."""
    tokens, offsets, offset = [texts.text(token) for token in piece.ids], [], piece.start
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    top = [{texts.text(token): _finite(logprob) for token, logprob in row[:count]} for row in piece.top]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(logprob) for logprob in piece.logprobs],
        "top_logprobs": top if count else None,
        "text_offset": offsets,
    }


def chat_logprobs(texts: TokenTexts, piece: Piece, count: int) -> dict[str, Any]:
    """Logprobs of `/v1/chat/completions`."""

    def show(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": texts.bytes(token)}

    content = [
        {**show(token, logprob), "top_logprobs": [show(*pair) for pair in row[:count]]}
        for token, logprob, row in zip(piece.ids, piece.logprobs, _rows(piece), strict=True)
    ]
    return {"content": content, "refusal": None}


def explanation(texts: TokenTexts, piece: Piece) -> dict[str, Any]:
    """The tokens of a piece and their alternatives."""

    def show(token: int, logprob: float) -> dict[str, Any]:
        return {"id": token, "text": texts.text(token), "logprob": _finite(logprob)}

    return {
        "tokens": [
            {**show(token, logprob), "alternatives": [show(*pair) for pair in row[:ALTERNATIVES]]}
            for token, logprob, row in zip(piece.ids, piece.logprobs, _rows(piece), strict=True)
        ]
    }


def _rows(piece: Piece) -> Sequence[Sequence[tuple[int, float]]]:
    return piece.top or [[]] * len(piece.ids)


def _finite(logprob: float) -> float:
    """JSON has no infinity: a token that a constraint excludes has the logprob that OpenAI gives to unlikely ones."""
    return max(logprob, -9999.0)
