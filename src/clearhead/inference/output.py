"""The result of generation, and the length penalty of its score."""

from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray
from torch import Tensor

from clearhead.config import GenerationConfig

Length = TypeVar("Length", float, NDArray[Any])


class GenerationOutput(NamedTuple):
    """One generated sequence.

    `ids` are the new tokens without the prompt and without EOS. `finished` is True if an EOS token or a stop string
    ended the sequence, False if a length limit did. `score` is the sum of the logprobs, EOS included, divided by the
    length penalty.
    """

    ids: list[int]
    finished: bool
    score: float | None = None  # always set by beam search; by greedy search and sampling if config.logprobs
    logprobs: list[float] | None = None  # of each token, EOS included, if config.logprobs
    alignment: Tensor | None = None  # (T, S) attention weights of prefix and ids, if config.align


def length_penalty(config: GenerationConfig, length: Length) -> Length:
    """Return the divisor of a sum of logprobs over `length` tokens."""
    return (length if config.length_form == "power" else (5 + length) / 6) ** config.length_penalty


def make_output(ids: list[int], finished: bool, logprobs: list[float], config: GenerationConfig) -> GenerationOutput:
    """Build the output of greedy search or sampling, with score and logprobs if config.logprobs."""
    if not config.logprobs:
        return GenerationOutput(ids, finished)
    score = sum(logprobs) / length_penalty(config, float(len(logprobs)))
    return GenerationOutput(ids, finished, score, logprobs)
