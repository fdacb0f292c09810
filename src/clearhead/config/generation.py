"""Generation settings (greedy, sampling, beam search) and limits of the batching engine."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clearhead.config.settings import Settings


def _as_tuples(value: Any) -> Any:
    """Convert the lists of YAML and JSON to tuples."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(ids) if isinstance(ids, list) else ids for ids in value)


TokenSequence = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 24)], ...], Field(min_length=1, max_length=256)]
TokenSequences = Annotated[tuple[TokenSequence, ...], BeforeValidator(_as_tuples), Field(max_length=10_000)]


class GenerationConfig(Settings):
    """Decoding settings: greedy (temperature 0, beam 1), sampling (temperature > 0) or beam search (beam > 1)."""

    # Length of the output, without the prompt
    max_new_tokens: int = Field(default=256, ge=1, le=1 << 20)  # end token included
    min_new_tokens: int = Field(default=0, ge=0, le=1 << 20)  # end token not included

    # Sampling
    temperature: float = Field(default=0.0, ge=0, le=100)  # divides the logits; 0: greedy
    top_k: int = Field(default=0, ge=0, le=1 << 24)  # sample from the k most likely tokens; 0: off
    top_p: float = Field(default=1.0, gt=0, le=1)  # sample from the smallest set with this total probability; 1: off
    min_p: float = Field(default=0.0, ge=0, le=1)  # drop tokens below this fraction of the top probability; 0: off
    samples: int = Field(default=1, ge=1, le=1024)  # outputs per prompt

    # Beam search
    beam: int = Field(default=1, ge=1, le=64)  # beams per prompt; 1: no beam search
    n_best: int = Field(default=1, ge=1, le=64)  # hypotheses to return per prompt
    length_penalty: float = Field(default=1.0, ge=-10, le=10)  # α in score / length^α
    length_form: Literal["power", "gnmt"] = "power"  # gnmt: score / ((5 + length) / 6)^α, as in the 2017 paper
    # full: stop at `beam` finished hypotheses; likely: when no running beam scores above the worst finished hypothesis;
    # never: when no running beam could end with a higher score
    early_stopping: Literal["full", "likely", "never"] = "likely"

    # Constraints on tokens
    # Scales the logits of tokens in the prompt or the output; 1: off
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    presence_penalty: float = Field(default=0.0, ge=-100, le=100)  # subtracted from the logits of tokens in the output
    frequency_penalty: float = Field(default=0.0, ge=-100, le=100)  # the same, times how often they occur in the output
    no_repeat_ngram_size: int = Field(default=0, ge=0, le=1024)  # no n-gram of this size occurs twice; 0: off
    banned_ids: TokenSequences = ()  # token sequences that never occur
    forced_ids: TokenSequences = ()  # token sequences that occur before the end token

    # Additional outputs
    logprobs: bool = False  # log-probabilities of the tokens; beam search always returns its scores
    top_logprobs: int = Field(default=0, ge=0, le=20)  # also of this many most likely tokens (batching engine only)
    align: bool = False  # for translators: attention-based alignment of target to source words

    # Batching
    batch_tokens: int = Field(default=8192, ge=1, le=1 << 24)  # prompts × beams × longest prompt or source
    batch_size: int | None = Field(default=None, ge=1, le=1 << 16)  # prompts or sources; None: as cache memory allows
    workers: int = Field(default=0, ge=0, le=1024)  # concurrent batches on a CPU; 0: two if there are several threads

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = list(_contradictions(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


class EngineConfig(Settings):
    """Limits of the batching engine: memory and queue length are bounded under any load."""

    max_batch_size: int = Field(default=32, ge=1, le=1 << 16)  # requests that decode concurrently
    cache_tokens: int = Field(default=1 << 16, ge=1, le=1 << 30)  # KV cache: tokens of all texts and sources
    # Tokens of prompts and sources per step, which the other requests wait for; None: 512 on a CPU, else 4096
    prefill_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    max_queue: int = Field(default=1024, ge=1, le=1 << 24)  # waiting requests; more are refused


def _contradictions(c: GenerationConfig) -> Iterator[str]:
    """Yield `key: what is wrong; how to fix it` for settings that exclude each other."""
    if c.min_new_tokens > c.max_new_tokens:
        yield f"min_new_tokens: {c.min_new_tokens} is more than max_new_tokens {c.max_new_tokens}; lower it"
    if c.beam > 1 and c.temperature > 0:
        yield f"temperature: {c.temperature:g}, but beam search (beam {c.beam}) never samples; set it to 0 or beam to 1"
    if c.n_best > c.beam:
        yield f"n_best: {c.n_best} is more than the beam {c.beam}; use at most {c.beam}, or samples with a temperature"
    if c.samples > 1 and c.temperature == 0:
        yield f"samples: {c.samples}, but without a temperature all are the same; set one, like temperature=1.0"
    needed = sum(len(ids) for ids in c.forced_ids) + 1
    if c.forced_ids and needed > c.max_new_tokens:
        yield f"forced_ids: {needed} tokens with the end token, but max_new_tokens is {c.max_new_tokens}; raise it"
    if both := sorted({ids for ids in c.forced_ids if ids in c.banned_ids}):
        yield f"forced_ids: {list(both[0])} is banned too; remove it from forced_ids or banned_ids"
