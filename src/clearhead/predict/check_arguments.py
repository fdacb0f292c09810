"""Check the arguments of a model's methods: a wrong type is the package's own error, not one from inside torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from clearhead.errors import UserError


def check_number(name: str, value: Any, smallest: int) -> None:
    """Refuse what is not a whole number of at least `smallest`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UserError(f"{name}: {_kind(value)} is not a whole number; write it like {max(5, smallest)}")
    if value < smallest:
        raise UserError(f"{name}: {value} is too small; use {smallest} or more")


def check_string(name: str, value: Any) -> None:
    """Refuse what is not a string."""
    if not isinstance(value, str):
        raise UserError(f"{name}: {_kind(value)} is not a text; give a string")


def as_path(name: str, value: Any) -> Path:
    """Return a path; refuse what is none."""
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{name}: {_kind(value)} is not a path; give a string or a Path")
    return Path(value)


def texts_of(command: str, texts: Any) -> list[Any]:
    """Texts as a list; one text is a list of one."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise UserError(f"{command}: {_kind(texts)} is not a text; give a string, or a list of strings")
    return list(texts)


def check_ids(name: str, ids: Any) -> None:
    """Refuse what is not a sequence of token ids."""
    is_list = isinstance(ids, Collection) and not isinstance(ids, str | bytes | Mapping)
    if not is_list or not all(isinstance(each, Integral) for each in ids):
        raise UserError(f"{name}: {_kind(ids)} is neither a text nor a list of token ids; give one of them")


def check_prompt_ids(ids: Any, vocab: int) -> None:
    """Refuse a prompt that is no sequence of ids of the vocabulary, or has none."""
    check_ids("stream", ids)
    if not len(ids):
        raise UserError("prompt: no token ids; give at least one")
    if (wrong := next((each for each in ids if not 0 <= each < vocab), None)) is not None:
        raise UserError(f"prompt: token {wrong} is outside the vocabulary; give ids from 0 to {vocab - 1}")


def _kind(value: Any) -> str:
    return type(value).__name__
