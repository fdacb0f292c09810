"""Logits processors: penalties, minimum length, banned and forced token sequences.   B batch · V vocabulary · T tokens

A processor is called with logits (B, V), which it may change in place, and the token buffer; it returns the processed
logits. Greedy search and sampling pass logits, beam search logprobs, as in transformers. No processor synchronizes
with the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from clearhead.config import GenerationConfig
from clearhead.inference.request import EngineRequest
from clearhead.inference.token_buffer import TokenBuffer

FORCED_MIN_LOGIT = -1e4  # of a forced token that another processor has banned: it is generated nevertheless

PROCESSED = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "banned_ids",
    "min_new_tokens",
    "forced_ids",
)  # options that build_processors reads
LogitsProcessor = Callable[[Tensor, TokenBuffer], Tensor]


def build_processors(config: GenerationConfig, eos_ids: Tensor) -> list[LogitsProcessor]:
    """Return the processors of a config in the order in which they apply; `eos_ids` has shape (N,)."""
    processors: list[LogitsProcessor] = []
    if config.repetition_penalty != 1:
        processors.append(RepetitionPenalty(config.repetition_penalty))
    if config.presence_penalty:
        processors.append(PresencePenalty(config.presence_penalty))
    if config.frequency_penalty:
        processors.append(FrequencyPenalty(config.frequency_penalty))
    if config.no_repeat_ngram_size:
        processors.append(NoRepeatNgram(config.no_repeat_ngram_size))
    if config.banned_ids:
        processors.append(BannedSequences(config.banned_ids))
    if config.min_new_tokens:
        processors.append(MinNewTokens(config.min_new_tokens, eos_ids))
    if config.forced_ids:
        processors.append(ForcedSequences(config.forced_ids, eos_ids))
    return processors


def process_rows(logits: Tensor, requests: Sequence[EngineRequest], eos_ids: Tensor) -> dict[int, Exception]:
    """Change the logits (M, V) of requests in place, by their options and constraints; return errors of constraints."""
    errors, groups = dict[int, Exception](), dict[tuple[object, ...], list[int]]()
    for index, request in enumerate(requests):
        groups.setdefault(tuple(getattr(request.config, name) for name in PROCESSED), []).append(index)
    for indices in groups.values():
        processors = build_processors(requests[indices[0]].config, eos_ids)
        if not processors:
            continue
        rows, buffer = (
            torch.tensor(indices, device=logits.device),
            _buffer_of([requests[index] for index in indices], logits),
        )
        changed = logits[rows]
        for process in processors:
            changed = process(changed, buffer)
        logits[rows] = changed
    for index, request in enumerate(requests):
        try:
            allowed = None if request.constraint is None else request.constraint.allowed(request.ids)
            if allowed is not None:
                logits[index].masked_fill_(~torch.from_numpy(allowed).to(logits.device), -math.inf)
        except Exception as error:  # the others go on
            errors[index] = error
    return errors


def _buffer_of(requests: Sequence[EngineRequest], logits: Tensor) -> TokenBuffer:
    """Return the tokens of requests as a buffer."""
    new = [len(request.ids) for request in requests]
    limits = [request.limit - count for request, count in zip(requests, new, strict=True)]
    rows = [[*request.prompt, *request.ids] for request in requests]
    buffer = TokenBuffer(rows, limits, logits.shape[1], logits.device)
    buffer.num_new = torch.tensor(new, device=logits.device)
    return buffer


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divide positive and multiply negative logits of tokens in the prompt or the new tokens by a penalty."""

    penalty: float

    def __call__(self, logits: Tensor, buffer: TokenBuffer) -> Tensor:
        penalized = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(_present(buffer.ids, logits), penalized, logits)


@dataclass(frozen=True)
class PresencePenalty:
    """Subtract a penalty from the logits of tokens that occur among the new tokens."""

    penalty: float

    def __call__(self, logits: Tensor, buffer: TokenBuffer) -> Tensor:
        return logits - self.penalty * _present(buffer.new_ids, logits).to(logits.dtype)


@dataclass(frozen=True)
class FrequencyPenalty:
    """Subtract a penalty from the logits of the new tokens, times how often each occurs."""

    penalty: float

    def __call__(self, logits: Tensor, buffer: TokenBuffer) -> Tensor:
        counts = logits.new_zeros(logits.shape[0], logits.shape[1] + 1)
        counts.scatter_add_(1, buffer.new_ids, torch.ones_like(buffer.new_ids, dtype=logits.dtype))
        return logits - self.penalty * counts[:, :-1]


@dataclass(frozen=True)
class NoRepeatNgram:
    """Ban tokens that would repeat an n-gram of the prompt or the new tokens."""

    size: int

    def __call__(self, logits: Tensor, buffer: TokenBuffer) -> Tensor:
        if buffer.max_length < self.size:
            return logits
        ngrams = buffer.ids.unfold(1, self.size, 1)  # (B, T - n + 1, n)
        matches = (ngrams[..., :-1] == buffer.last_tokens(self.size - 1)[:, None]).all(dim=-1)
        banned = ngrams[..., -1].masked_fill(~matches, buffer.pad_id)
        return logits.masked_fill(_present(banned, logits), -math.inf)


class BannedSequences:
    """Ban sequences of one or more tokens: the last token is banned where the row ends with the others."""

    def __init__(self, sequences: tuple[tuple[int, ...], ...]):
        by_length = groupby(sorted(sequences, key=len), key=len)
        self.sequences = [torch.tensor(list(group)) for _, group in by_length]  # (sequences of one length, length) each

    def __call__(self, logits: Tensor, buffer: TokenBuffer) -> Tensor:
        for index, sequences in enumerate(self.sequences):
            sequences = self.sequences[index] = sequences.to(logits.device)
            if sequences.shape[1] == 1:
                logits = logits.index_fill_(1, sequences[:, 0], -math.inf)
                continue
            last = buffer.last_tokens(sequences.shape[1] - 1)
            matches = (sequences[:, :-1] == last[:, None]).all(dim=-1)  # (B, sequences)
            banned = torch.where(matches, sequences[:, -1], buffer.pad_id)
            logits = logits.masked_fill(_present(banned, logits), -math.inf)
        return logits


@dataclass(frozen=True)
class MinNewTokens:
    """Ban EOS until a row has `count` new tokens, EOS not counted."""

    count: int
    eos_ids: Tensor

    def __call__(self, logits: Tensor, buffer: TokenBuffer) -> Tensor:
        too_short = (buffer.num_new < self.count)[:, None]
        return logits.index_copy_(1, self.eos_ids, logits[:, self.eos_ids].masked_fill(too_short, -math.inf))


class ForcedSequences:
    """Force sequences of tokens to occur among the new tokens of every row (every beam).

    A sequence that has begun is continued. Where EOS is the most likely token, or the tokens left are only just enough,
    the first missing sequence begins.
    """

    def __init__(self, sequences: tuple[tuple[int, ...], ...], eos_ids: Tensor):
        self.sequences, self.eos_ids = [torch.tensor(ids, device=eos_ids.device) for ids in sequences], eos_ids

    def __call__(self, logits: Tensor, buffer: TokenBuffer) -> Tensor:
        new_ids = buffer.new_ids  # (B, T)
        needed = torch.zeros_like(buffer.lengths)  # tokens of all missing sequences
        next_token = torch.full_like(buffer.lengths, -1)  # of the missing sequence with the longest match
        longest_match = torch.full_like(buffer.lengths, -1)
        for sequence in self.sequences:
            missing = ~_contains(new_ids, sequence)
            matched = self._matched(buffer, sequence)
            needed += missing * (len(sequence) - matched)
            better = missing & (matched > longest_match)
            next_token = torch.where(better, sequence[matched.clamp(max=len(sequence) - 1)], next_token)
            longest_match = torch.where(better, matched, longest_match)
        eos_is_best = (logits.argmax(dim=-1)[:, None] == self.eos_ids).any(dim=-1)
        force = (needed > 0) & ((longest_match > 0) | eos_is_best | (buffer.num_left <= needed + 1))
        logits = torch.where((needed > 0)[:, None], logits.index_fill(1, self.eos_ids, -math.inf), logits)
        next_token = next_token.clamp(min=0)[:, None]
        next_logit = logits.gather(1, next_token).clamp(min=FORCED_MIN_LOGIT)
        only_next = torch.full_like(logits, -math.inf).scatter(1, next_token, next_logit)
        return torch.where(force[:, None], only_next, logits)

    @staticmethod
    def _matched(buffer: TokenBuffer, sequence: Tensor) -> Tensor:
        """Return the length (B,) of the longest proper prefix of the sequence that the row's new tokens end with."""
        matched = torch.zeros_like(buffer.lengths)
        for count in range(1, len(sequence)):
            matches = (buffer.last_tokens(count) == sequence[:count]).all(dim=-1) & (buffer.num_new >= count)
            matched = torch.where(matches, count, matched)
        return matched


def _present(ids: Tensor, logits: Tensor) -> Tensor:
    """Return a mask (B, V) of the tokens among ids (B, T), padding aside."""
    present = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    return present.scatter_(1, ids, True)[:, :-1]


def _contains(ids: Tensor, sequence: Tensor) -> Tensor:
    """Return whether each row of ids (B, T) contains the sequence: (B,)."""
    if ids.shape[1] < len(sequence):
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    return (ids.unfold(1, len(sequence), 1) == sequence).all(dim=-1).any(dim=-1)
