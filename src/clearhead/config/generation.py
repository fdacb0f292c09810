"""How text is searched for: greedy, sampling or beam, every limit and penalty; contradictions are errors."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clearhead.config.settings import Settings


def _words(value: Any) -> Any:
    """Lists, as YAML and JSON have them, as tuples."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(word) if isinstance(word, list) else word for word in value)


Word = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 24)], ...], Field(min_length=1, max_length=256)]
Words = Annotated[tuple[Word, ...], BeforeValidator(_words), Field(max_length=10_000)]


class GenerationConfig(Settings):
    """Temperature 0 and beam 1 is greedy search; a temperature samples; a beam above 1 is beam search."""

    # Length behind the prompt
    max_new_tokens: int = Field(default=256, ge=1, le=1 << 20)  # with the end
    min_new_tokens: int = Field(default=0, ge=0, le=1 << 20)  # without it

    # Sampling
    temperature: float = Field(default=0.0, ge=0, le=100)
    top_k: int = Field(default=0, ge=0, le=1 << 24)  # 0: all words
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    samples: int = Field(default=1, ge=1, le=1024)  # outputs of each prompt

    # Beam search
    beam: int = Field(default=1, ge=1, le=64)
    n_best: int = Field(default=1, ge=1, le=64)
    length_penalty: float = Field(default=1.0, ge=-10, le=10)  # α of score / length^α
    length_form: Literal["power", "gnmt"] = "power"  # gnmt: score / ((5 + length) / 6)^α, as the 2017 paper
    early_stopping: Literal["full", "likely", "never"] = "likely"

    # What may be written
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    presence_penalty: float = Field(default=0.0, ge=-100, le=100)
    no_repeat_ngram_size: int = Field(default=0, ge=0, le=1024)  # 0: off
    banned_ids: Words = ()  # words as token ids, which never come
    forced_ids: Words = ()  # words which come somewhere before the end

    # What is told beside the ids
    logprobs: bool = False  # log-probabilities; beam search has its scores in any case
    align: bool = False  # which source tokens each target token looked at

    # How the work is cut up
    batch_tokens: int = Field(default=8192, ge=1, le=1 << 24)  # rows × beams × longest prompt or source
    batch_size: int | None = Field(default=None, ge=1, le=1 << 16)  # prompts or sources; None: what the caches allow
    workers: int = Field(default=0, ge=0, le=1024)  # batches at a time on a CPU; 0: two where there are threads

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = list(_contradictions(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


class EngineConfig(Settings):
    """How much a batching engine takes on: memory and waiting are bounded, whatever comes."""

    max_batch_size: int = Field(default=32, ge=1, le=1 << 16)  # that are written at once
    cache_tokens: int = Field(default=1 << 16, ge=1, le=1 << 30)  # rows × (the longest text and source among them)
    prefill_tokens: int = Field(default=4096, ge=1, le=1 << 24)  # rows × longest prompt or source read in one step
    max_queue: int = Field(default=1024, ge=1, le=1 << 24)  # requests in the queue


def _contradictions(c: GenerationConfig) -> Iterator[str]:
    """Each yields a sentence that names the keys and says what to change."""
    if c.min_new_tokens > c.max_new_tokens:
        yield f"min_new_tokens: {c.min_new_tokens} is more than max_new_tokens {c.max_new_tokens}; lower it"
    if c.beam > 1 and c.temperature > 0:
        yield f"temperature: {c.temperature:g}, but beam search (beam {c.beam}) draws nothing; set it to 0 or beam to 1"
    if c.n_best > c.beam:
        yield f"n_best: {c.n_best} is more than the beam {c.beam}; use at most {c.beam}, or samples with a temperature"
    if c.samples > 1 and c.temperature == 0:
        yield f"samples: {c.samples}, but without a temperature all are the same; set one, like temperature=1.0"
    needed = sum(len(word) for word in c.forced_ids) + 1
    if c.forced_ids and needed > c.max_new_tokens:
        yield f"forced: {needed} tokens with the end, but max_new_tokens is {c.max_new_tokens}; raise it"
    if both := sorted({word for word in c.forced_ids if word in c.banned_ids}):
        yield f"forced: {list(both[0])} is banned too; remove it from one of the two"
