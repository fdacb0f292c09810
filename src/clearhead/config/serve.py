"""Settings of the HTTP server: where it listens, and an upper bound for everything that a client can send."""

import ipaddress
from typing import Self

from pydantic import Field, model_validator

from clearhead.config.generation import EngineConfig
from clearhead.config.settings import Settings

# Bounds of the request schemas; the settings below can only lower them.
MAX_NEW_TOKENS = 1 << 20
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 256
MAX_BATCH_ITEMS = 2048
MAX_TEXT_CHARS = 1 << 20
MAX_MESSAGES = 1024
MAX_BEAM = 64
MAX_TOP = 100  # answers, fills or matches of one text
MAX_SEED = (1 << 62) - 1


class ServeLimits(Settings):
    """What one request may ask for; anything larger is refused with the name of the limit."""

    max_body_bytes: int = Field(default=1 << 20, ge=1024, le=1 << 28)
    max_prompt_tokens: int = Field(default=1 << 17, ge=1, le=1 << 24)
    max_new_tokens: int = Field(default=4096, ge=1, le=MAX_NEW_TOKENS)
    max_samples: int = Field(default=16, ge=1, le=MAX_SAMPLES)  # `n`, together for all prompts of a request
    max_logprobs: int = Field(default=MAX_LOGPROBS, ge=0, le=MAX_LOGPROBS)
    max_stop_strings: int = Field(default=MAX_STOP_STRINGS, ge=0, le=MAX_STOP_STRINGS)
    max_batch_items: int = Field(default=256, ge=1, le=MAX_BATCH_ITEMS)  # prompts or texts
    max_beam: int = Field(default=16, ge=1, le=MAX_BEAM)
    max_schema_bytes: int = Field(default=1 << 14, ge=1, le=1 << 20)  # of a JSON schema
    deadline_seconds: float = Field(default=600, gt=0, le=86400)  # of a whole request; then it is cancelled
    body_seconds: float = Field(default=10, gt=0, le=3600)  # to receive headers and body
    send_seconds: float = Field(default=30, gt=0, le=3600)  # to take a piece of the answer


class ServeConfig(Settings):
    """The HTTP server."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free one
    insecure: bool = False  # listen beyond this machine without API keys
    host_names: tuple[str, ...] = Field(default=(), max_length=100)  # further names in the Host header
    cors_origins: tuple[str, ...] = Field(default=(), max_length=100)  # pages of other origins that may call
    log_texts: bool = False  # prompts and outputs in the log
    max_connections: int = Field(default=2048, ge=1, le=1 << 16)
    max_waiting: int = Field(default=256, ge=0, le=1 << 16)  # requests of a model waiting; more are refused with 429
    batch_wait_ms: float = Field(default=2, ge=0, le=1000)  # to collect texts of several requests for one encoder pass
    grace_seconds: float = Field(default=30, ge=0, le=3600)  # for running requests after SIGTERM
    keep_alive_seconds: float = Field(default=15, gt=0, le=3600)  # between the comments that keep a stream open
    ready_seconds: float = Field(default=30, gt=0, le=3600)  # a model is ready if it ran within this time, or runs now
    limits: ServeLimits = ServeLimits()
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("host_names", "cors_origins"):
            if any("*" in value for value in getattr(self, key)):
                raise ValueError(f"{key}: * would allow every page of the web; list the names that you use")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False
