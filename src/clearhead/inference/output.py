"""What a search gives back."""

from typing import NamedTuple, TypeVar

from torch import Tensor

from clearhead.config import GenerationConfig

Number = TypeVar("Number", float, Tensor)


class GenerationOutput(NamedTuple):
    """One text that was found.

    `ids` are what was written behind the prompt, without the end; `finished` says whether an end (or a stop string)
    came, or the limit. `score` is the sum of the log-probabilities, the end's among them, over the length penalty.
    """

    ids: list[int]
    finished: bool
    score: float | None = None  # greedy and sampling: where config.scores asks for it
    logprobs: list[float] | None = None  # of each id, and of the end where one came
    alignment: Tensor | None = None  # (target, source) weights, where config.align asks for it


def divisor(config: GenerationConfig, length: Number) -> Number:
    """What a sum of log-probabilities over `length` tokens is divided by."""
    return (length if config.length_form == "power" else (5 + length) / 6) ** config.length_penalty


def scored(ids: list[int], finished: bool, chances: list[float], config: GenerationConfig) -> GenerationOutput:
    """A text that was written straight on; with the log-probabilities of its tokens and end, where they are wanted."""
    if not config.logprobs:
        return GenerationOutput(ids, finished)
    return GenerationOutput(ids, finished, sum(chances) / divisor(config, float(len(chances))), chances)
