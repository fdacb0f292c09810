"""What changes the scores before a word is chosen: penalties, bans, forced words.   R rows · V words · W tokens so far

Each is a small object, called with scores (R, V), into which it may write, and what stands in the rows; it gives the
scores that are left. Greedy search and sampling give logits, beam search log-probabilities, as transformers does. None
of them waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from clearhead.config import GenerationConfig
from clearhead.inference.token_buffer import TokenBuffer

LOW = -1e4  # what a forced word is worth where another rule bars it: it comes nevertheless

Processor = Callable[[Tensor, TokenBuffer], Tensor]


def processors(config: GenerationConfig, ends: Tensor) -> list[Processor]:
    """Those that the config asks for, in the order in which they work; `ends` (N,) are the tokens that end a text."""
    found: list[Processor] = []
    if config.repetition_penalty != 1:
        found.append(RepetitionPenalty(config.repetition_penalty))
    if config.presence_penalty:
        found.append(PresencePenalty(config.presence_penalty))
    if config.no_repeat_ngram_size:
        found.append(NoRepeat(config.no_repeat_ngram_size))
    if config.banned_ids:
        found.append(Banned(config.banned_ids))
    if config.min_new_tokens:
        found.append(Minimum(config.min_new_tokens, ends))
    if config.forced_ids:
        found.append(Forced(config.forced_ids, ends))
    return found


@dataclass(frozen=True)
class RepetitionPenalty:
    """What already stands in the row, prompt or new, becomes less likely: scores divided, or multiplied below 0."""

    penalty: float

    def __call__(self, scores: Tensor, written: TokenBuffer) -> Tensor:
        lowered = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return torch.where(_present(written.ids, scores), lowered, scores)


@dataclass(frozen=True)
class PresencePenalty:
    """What has been newly written loses a fixed amount."""

    penalty: float

    def __call__(self, scores: Tensor, written: TokenBuffer) -> Tensor:
        return scores - self.penalty * _present(written.new_tokens, scores).to(scores.dtype)


@dataclass(frozen=True)
class NoRepeat:
    """No n tokens in a row come twice, the prompt's included."""

    size: int

    def __call__(self, scores: Tensor, written: TokenBuffer) -> Tensor:
        if written.max_length < self.size:
            return scores
        windows = written.ids.unfold(1, self.size, 1)  # (R, W - n + 1, n)
        again = (windows[..., :-1] == written.recent(self.size - 1)[:, None]).all(dim=-1)
        return scores.masked_fill(_present(windows[..., -1].masked_fill(~again, written.filler), scores), -math.inf)


class Banned:
    """Words, of one token or several, that never come: the last token of one is barred where the others stand."""

    def __init__(self, words: tuple[tuple[int, ...], ...]):
        sized = groupby(sorted(words, key=len), key=len)
        self.words = [torch.tensor(list(group)) for _, group in sized]  # (words of a length, length) each

    def __call__(self, scores: Tensor, written: TokenBuffer) -> Tensor:
        for number, words in enumerate(self.words):
            words = self.words[number] = words.to(scores.device)
            if words.shape[1] == 1:
                scores = scores.index_fill_(1, words[:, 0], -math.inf)
                continue
            begun = (words[:, :-1] == written.recent(words.shape[1] - 1)[:, None]).all(dim=-1)  # (R, words)
            barred = torch.where(begun, words[:, -1], written.filler)
            scores = scores.masked_fill(_present(barred, scores), -math.inf)
        return scores


@dataclass(frozen=True)
class Minimum:
    """No end before so many new tokens, the end not counted."""

    tokens: int
    ends: Tensor

    def __call__(self, scores: Tensor, written: TokenBuffer) -> Tensor:
        early = (written.new < self.tokens)[:, None]
        return scores.index_copy_(1, self.ends, scores[:, self.ends].masked_fill(early, -math.inf))


class Forced:
    """Words that have to come: one that was begun is finished; where the text would end, or could not hold them
    later, the first that is missing begins. Each branch of a search obeys by itself."""

    def __init__(self, words: tuple[tuple[int, ...], ...], ends: Tensor):
        self.words, self.ends = [torch.tensor(word, device=ends.device) for word in words], ends

    def __call__(self, scores: Tensor, written: TokenBuffer) -> Tensor:
        fresh = written.new_tokens  # (R, W)
        needed = torch.zeros_like(written.lengths)
        following = torch.full_like(written.lengths, -1)  # the token that would go on with a missing word
        furthest = torch.full_like(written.lengths, -1)  # how much of that word stands already
        for word in self.words:
            missing = ~_contains(fresh, word)
            begun = self._begun(written, word)
            needed += missing * (len(word) - begun)
            better = missing & (begun > furthest)
            following = torch.where(better, word[begun.clamp(max=len(word) - 1)], following)
            furthest = torch.where(better, begun, furthest)
        would_end = (scores.argmax(dim=-1)[:, None] == self.ends).any(dim=-1)
        due = (needed > 0) & ((furthest > 0) | would_end | (written.left <= needed + 1))
        scores = torch.where((needed > 0)[:, None], scores.index_fill(1, self.ends, -math.inf), scores)
        following = following.clamp(min=0)[:, None]
        worth = scores.gather(1, following).clamp(min=LOW)
        alone = torch.full_like(scores, -math.inf).scatter(1, following, worth)
        return torch.where(due[:, None], alone, scores)

    @staticmethod
    def _begun(written: TokenBuffer, word: Tensor) -> Tensor:
        """How many tokens of the word the row's new tokens end with, fewer than all: (R,)."""
        begun = torch.zeros_like(written.lengths)
        for count in range(1, len(word)):
            stands = (written.recent(count) == word[:count]).all(dim=-1) & (written.new >= count)
            begun = torch.where(stands, count, begun)
        return begun


def _present(ids: Tensor, scores: Tensor) -> Tensor:
    """True for the words that stand among ids (R, W), filler aside: (R, V)."""
    found = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool, device=scores.device)
    return found.scatter_(1, ids, True)[:, :-1]


def _contains(ids: Tensor, word: Tensor) -> Tensor:
    """Whether a word stands somewhere in each row of ids (R, W): (R,)."""
    if ids.shape[1] < len(word):
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    return (ids.unfold(1, len(word), 1) == word).all(dim=-1).any(dim=-1)
