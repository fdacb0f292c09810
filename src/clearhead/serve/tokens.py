"""Prompts to ids, with the errors that OpenAI's clients know."""

from __future__ import annotations

from collections.abc import Sequence

from clearhead.config.serve import ServeLimits
from clearhead.predict.model import Model
from clearhead.serve.errors import ApiError


def prompt_ids(model: Model, text: str) -> list[int]:
    """The ids of a prompt, starting with BOS if the model has one."""
    ids = model.prompt_ids(text)
    if not ids:
        raise ApiError(400, "prompt: empty, and this model has no begin token; give some text", param="prompt")
    return ids


def check_context(
    model: Model, ids: Sequence[int], max_tokens: int, limits: ServeLimits, param: str = "prompt"
) -> None:
    """Refuse ids outside the vocabulary, and prompts for which the model has too few positions."""
    positions, vocab = model.config.max_positions, model.config.target_vocab
    if max(ids, default=0) >= vocab:
        raise ApiError(400, f"{param}: token {max(ids)} is outside the vocabulary of {vocab:,} tokens", param=param)
    if len(ids) > limits.max_prompt_tokens:
        message = f"{param}: {len(ids):,} tokens; this server's limit is {limits.max_prompt_tokens:,}"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    if len(ids) + max_tokens > positions:
        message = f"{param}: {len(ids):,} tokens and {max_tokens:,} new ones, but the model has {positions:,} positions"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
