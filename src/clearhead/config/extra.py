"""Types of the keys of a model's config.json besides its architecture; other keys may hold anything."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from clearhead.config.settings import Settings
from clearhead.limits import MAX_SETTINGS_BYTES


def _limited(labels: list[str]) -> list[str]:
    size = sum(len(label.encode("utf-8", "replace")) for label in labels)
    if size > MAX_SETTINGS_BYTES:
        raise ValueError(f"{size:,} bytes of names; give names of at most {MAX_SETTINGS_BYTES:,} together")
    return labels


TokenId = Annotated[int, Field(ge=0, lt=1 << 24)]


class SamplingDefaults(Settings):
    """What a published model recommends for sampling; used where no other value is given."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=0, le=1 << 24)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)


class Extra(Settings):
    """How a model was trained, and what surrounds its texts; a missing key and null are the same."""

    model_config = ConfigDict(extra="ignore")

    task: str | None = Field(default=None, max_length=100)
    labels: Annotated[list[str], AfterValidator(_limited)] | None = None
    data: dict[str, Any] | None = None  # DataConfig, checked when it is used
    step: int | None = Field(default=None, ge=0)
    imported: str | None = None
    source: str | None = Field(default=None, max_length=400)  # where it was downloaded, with the commit
    begin: list[TokenId] | None = Field(default=None, max_length=256)
    eos_ids: list[TokenId] | None = Field(default=None, max_length=256)
    pad: TokenId | None = None
    source_begin: list[TokenId] | None = Field(default=None, max_length=256)
    source_end: bool | None = None
    languages: dict[str, TokenId] | None = Field(default=None, max_length=1000)
    src_lang: str | None = Field(default=None, max_length=40)
    tgt_lang: str | None = Field(default=None, max_length=40)
    banned_ids: list[list[TokenId]] | None = Field(default=None, max_length=10_000)
    chat_template: str | None = Field(default=None, max_length=MAX_SETTINGS_BYTES)
    sampling: SamplingDefaults | None = None
    pooling: Literal["cls", "mean"] | None = None
    normalized: bool | None = None
    max_length: int | None = Field(default=None, ge=1, le=1 << 24)


def checked_extra(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return these keys without the known ones that are null; raise if one has another type."""
    Extra.build(data, where)
    return {key: value for key, value in data.items() if value is not None or key not in Extra.model_fields}
