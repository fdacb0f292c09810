"""Base of all schemas, and the schema of an error."""

from pydantic import BaseModel, ConfigDict


class Schema(BaseModel):
    """A JSON object without unknown keys, where "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Answer(BaseModel):
    """A JSON object of ours."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """An error in OpenAI's form."""

    error: ErrorDetail


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
