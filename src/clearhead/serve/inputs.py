"""Texts as clients send them: one, or a list."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from clearhead.config.serve import MAX_BATCH_ITEMS, MAX_TEXT_CHARS, ServeLimits
from clearhead.serve.errors import ApiError
from clearhead.serve.sampling_options import check_limit

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
TextList = Annotated[list[Text], Field(min_length=1, max_length=MAX_BATCH_ITEMS)]
Texts = Text | TextList


def as_list(value: Any, limits: ServeLimits, param: str) -> list[Any]:
    """One text as a list of one; more than this server takes at once are refused."""
    texts = [value] if isinstance(value, str) else value
    check_limit(param, len(texts), limits.max_batch_items)
    return list(texts)


def paired(texts: list[str], value: Any, limits: ServeLimits, param: str) -> list[str]:
    """A second text for each text: a list of as many, or one for all."""
    others = as_list(value, limits, param)
    if isinstance(value, str):
        return others * len(texts)
    if len(others) != len(texts):
        raise ApiError(400, f"{param}: {len(others)} for {len(texts)} texts; give one for each", param=param)
    return others
