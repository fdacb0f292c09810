"""How a word is chosen from scores: the best, or drawn with noise that only the row's seed and place decide.

R rows · K beams · V words

Drawing is Gumbel's: the best of score / temperature + noise is a draw from the softmax. The noise of a word is a hash
of (seed of the row, number of the new token, word), so that a row's text never depends on its batch mates, the size of
the batch or the device; and since a choice is a plain function of the scores, guesses about it can be checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

from clearhead.config import GenerationConfig
from clearhead.ops.native import library as native

# splitmix64 (Steele, Lea and Flood 2014): an odd step, and two multipliers that mix it; int64 wraps around.
STEP, FIRST, SECOND = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

BLOCK = 64


@dataclass(frozen=True)
class Sampler:
    """Temperature 0 takes the best word; otherwise one is drawn among those that top-k, top-p and min-p leave."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, config: GenerationConfig) -> Self:
        """As the config says."""
        return cls(config.temperature, config.top_k, config.top_p, config.min_p)

    def __call__(self, scores: Tensor, seeds: Tensor, numbers: Tensor) -> Tensor:
        """scores (R, V), the seed of each row (R,) and the number of its new token (R,) to ids (R,)."""
        if self.temperature == 0:
            return highest(scores)
        words = torch.arange(scores.shape[-1], device=scores.device)
        return (self.narrowed(scores) + gumbel(seeds, numbers, words)).argmax(dim=-1)

    def narrowed(self, scores: Tensor) -> Tensor:
        """Scores at this temperature, -inf where a word is left out."""
        scores = scores / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        if self.top_p < 1:
            ordered, words = scores.sort(dim=-1, descending=True, stable=True)
            shares = ordered.softmax(dim=-1)
            beyond = shares.cumsum(dim=-1) - shares >= self.top_p  # those before it are enough; the first always stays
            scores = scores.masked_fill(beyond.scatter(-1, words, beyond), -math.inf)
        if self.min_p > 0:
            floor = scores.amax(dim=-1, keepdim=True) + math.log(self.min_p)
            scores = scores.masked_fill(scores < floor, -math.inf)
        return scores


def best(scores: Tensor, totals: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The highest of what each of K beams has, totals (R, K), plus what could follow it, scores (R, K, V): the sums,
    highest first, their beams and their words, (R, count) each.

    On a CPU much faster than topk of all: the highest are in those blocks whose highest are highest, so that few words
    have to be put in order.
    """
    words = scores.shape[2]
    if not scores.is_cpu or words < 4 * count * BLOCK:
        gains, found = scores.topk(min(count, words), dim=2)  # (R, K, up to count)
        sums, chosen = (totals[:, :, None] + gains).flatten(1).topk(min(count, gains[0].numel()), dim=1)
        return sums, chosen // found.shape[2], found.flatten(1).gather(1, chosen)
    if count and scores.dtype == totals.dtype == torch.float32 and native.library() is not None:
        return native.top_continuations(scores.contiguous(), totals.contiguous(), count)
    many, rest = divmod(words, BLOCK)  # the rest, of less than a block, is looked at in any case
    blocks = scores[:, :, : words - rest].unflatten(2, (many, BLOCK))
    chosen = (blocks.amax(dim=3) + totals[:, :, None]).flatten(1).topk(count, dim=1).indices  # (R, count)
    rows, beams = torch.arange(len(scores))[:, None], chosen // many
    near = blocks[rows, beams, chosen % many] + totals.gather(1, beams)[:, :, None]  # (R, count, BLOCK)
    last = scores[:, :, words - rest :] + totals[:, :, None]  # (R, K, rest)
    sums, places = torch.cat([near.flatten(1), last.flatten(1)], dim=1).topk(count, dim=1)
    block = chosen.gather(1, (places // BLOCK).clamp(max=count - 1))
    behind = places - near[0].numel()  # from 0 on where it is one of the rest
    tail = max(rest, 1)
    found = torch.where(behind < 0, block % many * BLOCK + places % BLOCK, words - rest + behind % tail)
    return sums, torch.where(behind < 0, block // many, behind // tail), found


def highest(scores: Tensor) -> Tensor:
    """The word (R,) with the highest of scores (R, V), the first of several: argmax, several times faster on a CPU."""
    size = _even_blocks(scores.shape[1]) if scores.is_cpu else None
    if size is None:
        return scores.argmax(dim=-1)
    blocks = scores.unflatten(1, (-1, size))
    block = blocks.amax(dim=2).argmax(dim=1)  # (R,)
    return block * size + blocks[torch.arange(len(scores)), block].argmax(dim=1)


@cache
def _even_blocks(words: int) -> int | None:
    """Into blocks of which size, about `BLOCK`, so many words can be cut evenly; None: into none, or there are few."""
    return next((size for size in range(BLOCK, 2 * BLOCK) if words % size == 0 and words > 4 * size), None)


def gumbel(seeds: Tensor, numbers: Tensor, words: Tensor) -> Tensor:
    """Gumbel noise (R, V) of the words (V,) for the token of that number (R,) in rows with these seeds (R,).

    The words are given: where this is compiled, a range made here would be multiplied in 32 bits, which STEP is beyond.
    """
    keys = mix(mix(seeds) + numbers * STEP)
    bits = mix(keys[:, None] + (words + 1) * STEP)
    chance = ((bits >> 32) & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return chance.neg_().log1p_().neg_().log_().neg_()  # -log(-log(1 - chance)), exact where the noise is largest


def mix(x: Tensor) -> Tensor:
    """Every bit of the result hangs on every bit of x (int64)."""
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """x >> places with zeros coming in, which int64 does not do by itself."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def sample_seeds(seeds: Sequence[int], samples: int) -> list[int]:
    """A seed for each of several samples of a row, row after row; the first keeps the row's own."""
    own, number = torch.tensor(seeds)[:, None], torch.arange(samples)
    return torch.where(number == 0, own, mix(own + number * SECOND)).flatten().tolist()
