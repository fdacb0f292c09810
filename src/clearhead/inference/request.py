"""A request of the engine and its output so far, and the checks before it is queued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.errors import UserError
from clearhead.inference.output import GenerationOutput, make_output
from clearhead.inference.stop_strings import IncrementalDetokenizer

EosIds = int | Sequence[int]
TokenIds = Sequence[int]
SEED_LIMIT = 1 << 63


class Constraint(Protocol):
    """What a text may continue with, such as a grammar."""

    def allowed(self, new_ids: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return which tokens (V,) may follow the new tokens so far; None if all may."""


class EngineRequest:
    """A request and its output so far: `ids` and `text` grow with every step until it is `done`."""

    def __init__(
        self,
        prompt: TokenIds,
        source: TokenIds | None,
        config: GenerationConfig,
        seed: int,
        limit: int,
        constraint: Constraint | None = None,
    ):
        self.prompt, self.source, self.config, self.seed, self.limit = prompt, source, config, seed, limit
        self.constraint = constraint
        self.ids: list[int] = []
        self.logprobs: list[float] = []  # of each id and of EOS, if config.logprobs
        self.top_logprobs: list[list[tuple[int, float]]] = []  # the most likely tokens at each of them
        self.output: GenerationOutput | None = None
        self.error: Exception | None = None  # why the request failed; `ids` and `text` are what was generated before
        self.cancelled = False
        self.detokenizer: IncrementalDetokenizer | None = None  # if the engine has a tokenizer
        self._text_taken = 0

    @property
    def done(self) -> bool:
        """Whether the request is finished, failed or cancelled."""
        return self.cancelled or self.output is not None or self.error is not None

    @property
    def text(self) -> str:
        """The text that is final: no incomplete character, nothing that may be the beginning of a stop string."""
        return "" if self.detokenizer is None else self.detokenizer.text

    def take_text(self) -> str:
        """Return the text added since the last call."""
        text = self.text
        start, self._text_taken = self._text_taken, len(text)
        return text[start:]

    @property
    def max_cache_tokens(self) -> int:
        """Maximum number of tokens in the KV cache; the last new token is never cached."""
        return len(self.prompt) + self.limit - 1

    @property
    def wanted_logprobs(self) -> int:
        """How many logprobs a step returns: -1 none, 0 that of the chosen token, n also those of the n most likely."""
        return self.config.top_logprobs or (0 if self.config.logprobs else -1)

    def append(self, token: int, eos_ids: Sequence[int]) -> None:
        """Append a token; finish at EOS, at a stop string or at the length limit."""
        finished = token in eos_ids
        if not finished:
            self.ids.append(token)
            finished = self.detokenizer is not None and self.detokenizer.add(token)
        if finished or len(self.ids) == self.limit:
            if self.detokenizer is not None:
                self.detokenizer.finish()
            # Set last: a reader on another thread that sees the output sees all of the text.
            self.output = make_output(self.ids, finished, self.logprobs, self.config)


def validate(
    model: ModelConfig,
    prompts: Sequence[TokenIds],
    sources: Sequence[TokenIds] | None,
    config: GenerationConfig,
    eos_ids: Sequence[int],
) -> None:
    """Raise an error for empty or too long prompts and sources, and for tokens outside the vocabulary."""
    max_positions, vocab_size = model.max_positions, model.target_vocab
    for name, rows, size in (("prompt", prompts, vocab_size), ("source", sources or (), model.source_vocab)):
        for number, row in enumerate(rows, start=1):
            if not row:
                raise ValueError(f"{name} {number} is empty; give it at least a begin or an end token")
            if len(row) > max_positions:
                raise UserError(
                    f"{name} {number} has {len(row)} tokens, but the model has {max_positions} positions; "
                    "shorten it, or split it"
                )
            if not 0 <= min(row) <= max(row) < size:
                wrong = next(token for token in row if not 0 <= token < size)
                raise ValueError(f"{name} {number}: token {wrong} is outside the vocabulary of {size} tokens")
    for name, groups in (("banned_ids", config.banned_ids), ("forced_ids", config.forced_ids), ("eos_ids", (eos_ids,))):
        for token in (token for group in groups for token in group if not 0 <= token < vocab_size):
            raise UserError(f"{name}: token {token} is outside the vocabulary of {vocab_size} tokens")


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise an error for seeds that do not fit into 64 bits."""
    if any(not -SEED_LIMIT <= seed < SEED_LIMIT for seed in seeds):
        raise UserError(f"a seed is a 64-bit integer, at most {SEED_LIMIT - 1}")


def eos_tuple(eos_ids: EosIds) -> tuple[int, ...]:
    """Return one or several EOS ids as a tuple without duplicates."""
    return (eos_ids,) if isinstance(eos_ids, int) else tuple(dict.fromkeys(eos_ids))


def new_token_limits(prompts: Sequence[TokenIds], max_new_tokens: int | Sequence[int], max_positions: int) -> list[int]:
    """Return how many tokens may follow each prompt; `max_new_tokens` may differ between them.

    The last token needs no position, since no decode step follows it.
    """
    most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    return [min(limit, max_positions - len(prompt) + 1) for limit, prompt in zip(most, prompts, strict=True)]
