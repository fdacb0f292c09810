"""The keyword arguments of `generate`, `translate`, `stream`, `chat` and `engine`, for editors and type checkers.

Values and defaults are checked by GenerationConfig and EngineConfig, whose keys and types these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class GenerationOptions(TypedDict, total=False):
    """Options of GenerationConfig."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    samples: int
    beam: int
    n_best: int
    length_penalty: float
    length_form: Literal["power", "gnmt"]
    early_stopping: Literal["full", "likely", "never"]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    banned_ids: Sequence[Sequence[int]]
    forced_ids: Sequence[Sequence[int]]
    logprobs: bool
    top_logprobs: int
    align: bool
    batch_tokens: int
    batch_size: int | None
    workers: int


class TranslationOptions(GenerationOptions, total=False):
    """Options of `translate`: those of GenerationConfig, and the languages of a model of several."""

    src_lang: str | None
    tgt_lang: str | None


class EngineOptions(TypedDict, total=False):
    """Options of EngineConfig."""

    max_batch_size: int
    cache_tokens: int
    prefill_tokens: int | None
    max_queue: int
