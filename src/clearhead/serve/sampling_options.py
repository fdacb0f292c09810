"""The options of a generated text that `/v1/completions` and `/v1/chat/completions` share."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import Field

from clearhead.config.serve import MAX_NEW_TOKENS, MAX_SAMPLES, MAX_SEED, MAX_STOP_CHARS, MAX_STOP_STRINGS, ServeLimits
from clearhead.serve.errors import ApiError
from clearhead.serve.schemas import Schema

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
ModelName = Annotated[str, Field(min_length=1, max_length=200, description="One of /v1/models.")]


class StreamOptions(Schema):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted; tokens are not padded


class SamplingOptions(Schema):
    """OpenAI's options, then those that vLLM and llama.cpp have, too."""

    model: ModelName | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=1, ge=1, le=MAX_SAMPLES)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    presence_penalty: float | None = Field(default=0, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None  # none is supported
    user: Annotated[str, Field(max_length=512)] | None = None  # accepted and ignored

    top_k: int = Field(default=0, ge=0, le=1 << 24)
    min_p: float = Field(default=0, ge=0, le=1)
    repetition_penalty: float = Field(default=1, gt=0, le=100)
    min_tokens: int = Field(default=0, ge=0, le=MAX_NEW_TOKENS)
    explain: bool = False  # per token: its logprob and its alternatives

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def first_seed(self) -> int:
        """The seed given, or one drawn for this request; the answer names it."""
        return secrets.randbits(31) if self.seed is None else self.seed

    def generation_options(self) -> dict[str, Any]:
        """Options of GenerationConfig, without lengths and logprobs; a null is the default."""
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_tokens,
        }

    def check(self, limits: ServeLimits, prompts: int = 1) -> None:
        """Refuse what this server's limits do not allow."""
        check_limit("n", (self.n or 1) * prompts, limits.max_samples if prompts == 1 else limits.max_batch_items)
        check_limit("stop", len(self.stops), limits.max_stop_strings)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only for stream=true; leave it out", param="stream_options")


def check_limit(param: str, value: int, limit: int) -> None:
    """Refuse a number above a limit of this server."""
    if value > limit:
        raise ApiError(400, f"{param}: {value:,} is more than this server's limit of {limit:,}", param=param)
