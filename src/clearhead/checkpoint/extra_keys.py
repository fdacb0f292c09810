"""Types of the keys of config.json beside the architecture; unknown ones are kept."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from clearhead.config.settings import Settings

MAX_LABEL_BYTES = 1_000_000


def _limited(labels: list[str]) -> list[str]:
    size = sum(len(label.encode()) for label in labels)
    if size > MAX_LABEL_BYTES:
        raise ValueError(f"{size:,} bytes are too many; give names of at most {MAX_LABEL_BYTES:,} together")
    return labels


Token = Annotated[int, Field(ge=0, lt=1 << 24)]
Tokens = Annotated[list[Token], Field(max_length=256)]


class ExtraKeys(Settings):
    """The keys that Clearhead writes or reads."""

    model_config = ConfigDict(extra="allow")

    task: Annotated[str, Field(max_length=100)] | None = None
    labels: Annotated[list[str], AfterValidator(_limited)] | None = None
    data: dict[str, Any] | None = None  # checked by DataConfig when it is used
    step: Annotated[int, Field(ge=0)] | None = None
    imported: Annotated[str, Field(max_length=1000)] | None = None
    begin: Tokens | None = None
    eos_ids: Tokens | None = None
    banned_ids: list[Tokens] | None = None
    source_end: bool | None = None
    pad: Token | None = None
    chat_template: str | None = None
    pooling: Literal["mean", "cls"] | None = None
    normalized: bool | None = None
    max_length: Annotated[int, Field(ge=1)] | None = None
