"""Greedy choice, and sampling by temperature, top-k, top-p and min-p.   B batch · K beams · V vocabulary

Sampling uses the Gumbel-max trick: argmax(logits / temperature + Gumbel noise) is a sample of the softmax. The noise of
a token is a hash of (seed of the row, number of new tokens so far, token), so a row's text does not depend on the other
rows, the batch size or the device. Since the choice is a plain function of the logits, speculative decoding can verify
draft tokens by comparing.
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

# splitmix64 (Steele, Lea and Flood 2014): the odd increment and the two multipliers; int64 wraps around.
INCREMENT, MIX1, MIX2 = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

BLOCK = 64  # tokens of a block of the two-level searches below


@dataclass(frozen=True)
class Sampler:
    """Choose tokens: the most likely at temperature 0, else a sample of those that top-k, top-p and min-p keep."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def from_config(cls, config: GenerationConfig) -> Self:
        """Take the sampling options of a generation config."""
        return cls(config.temperature, config.top_k, config.top_p, config.min_p)

    def __call__(self, logits: Tensor, seeds: Tensor, num_new: Tensor) -> Tensor:
        """Return token ids (B,) from logits (B, V), the seed of each row (B,) and its number of new tokens (B,)."""
        if self.temperature == 0:
            return argmax(logits)
        vocab = torch.arange(logits.shape[-1], device=logits.device)
        return (self.filter_logits(logits) + gumbel_noise(seeds, num_new, vocab)).argmax(dim=-1)

    def filter_logits(self, logits: Tensor) -> Tensor:
        """Divide by the temperature and set tokens outside top-k, top-p or min-p to -inf."""
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            threshold = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < threshold, -math.inf)
        if self.top_p < 1:
            ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
            probs = ordered.softmax(dim=-1)
            removed = probs.cumsum(dim=-1) - probs >= self.top_p  # keeps at least the first
            logits = logits.masked_fill(removed.scatter(-1, tokens, removed), -math.inf)
        if self.min_p > 0:
            threshold = logits.amax(dim=-1, keepdim=True) + math.log(self.min_p)
            logits = logits.masked_fill(logits < threshold, -math.inf)
        return logits


def top_continuations(logprobs: Tensor, beam_scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `count` highest sums of beam_scores (B, K) and logprobs (B, K, V), with their beams and tokens.

    The results have shape (B, count), highest first. On a CPU this is much faster than `topk`: the highest sums lie in
    the blocks with the highest maxima, so only those blocks are sorted.
    """
    vocab_size = logprobs.shape[2]
    if not logprobs.is_cpu or vocab_size < 4 * count * BLOCK:
        values, tokens = logprobs.topk(min(count, vocab_size), dim=2)  # (B, K, up to count)
        sums, index = (beam_scores[:, :, None] + values).flatten(1).topk(min(count, values[0].numel()), dim=1)
        return sums, index // tokens.shape[2], tokens.flatten(1).gather(1, index)
    if count and logprobs.dtype == beam_scores.dtype == torch.float32 and native.library() is not None:
        return native.beam_topk(logprobs.contiguous(), beam_scores.contiguous(), count)
    num_blocks, rest = divmod(vocab_size, BLOCK)  # the rest, less than a block, is always searched
    blocks = logprobs[:, :, : vocab_size - rest].unflatten(2, (num_blocks, BLOCK))
    best_blocks = (blocks.amax(dim=3) + beam_scores[:, :, None]).flatten(1).topk(count, dim=1).indices  # (B, count)
    rows, beams = torch.arange(len(logprobs))[:, None], best_blocks // num_blocks
    in_blocks = blocks[rows, beams, best_blocks % num_blocks] + beam_scores.gather(1, beams)[:, :, None]
    in_rest = logprobs[:, :, vocab_size - rest :] + beam_scores[:, :, None]  # (B, K, rest)
    sums, index = torch.cat([in_blocks.flatten(1), in_rest.flatten(1)], dim=1).topk(count, dim=1)
    block = best_blocks.gather(1, (index // BLOCK).clamp(max=count - 1))
    rest_index = index - in_blocks[0].numel()  # negative for sums in blocks
    rest_size = max(rest, 1)
    tokens = torch.where(
        rest_index < 0, block % num_blocks * BLOCK + index % BLOCK, vocab_size - rest + rest_index % rest_size
    )
    return sums, torch.where(rest_index < 0, block // num_blocks, rest_index // rest_size), tokens


def argmax(logits: Tensor) -> Tensor:
    """Return the token (B,) with the highest of logits (B, V), the first on ties; in blocks on a CPU, for speed."""
    size = _block_size(logits.shape[1]) if logits.is_cpu else None
    if size is None:
        return logits.argmax(dim=-1)
    blocks = logits.unflatten(1, (-1, size))
    block = blocks.amax(dim=2).argmax(dim=1)  # (B,)
    return block * size + blocks[torch.arange(len(logits)), block].argmax(dim=1)


@cache
def _block_size(vocab_size: int) -> int | None:
    """Return a divisor of the vocabulary size near BLOCK, or None if there is none or the vocabulary is small."""
    sizes = range(BLOCK, 2 * BLOCK)
    return next((size for size in sizes if vocab_size % size == 0 and vocab_size > 4 * size), None)


def gumbel_noise(seeds: Tensor, num_new: Tensor, vocab: Tensor) -> Tensor:
    """Return Gumbel noise (B, V) for the tokens `vocab` (V,) from seeds (B,) and numbers of new tokens (B,).

    `vocab` is a parameter because a range made here would be multiplied in 32 bits under torch.compile, and INCREMENT
    needs 64.
    """
    keys = splitmix64(splitmix64(seeds) + num_new * INCREMENT)
    bits = splitmix64(keys[:, None] + (vocab + 1) * INCREMENT)
    uniform = ((bits >> 32) & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()  # -log(-log(1 - uniform)), most exact for large noise


def splitmix64(x: Tensor) -> Tensor:
    """The mixing function of splitmix64 on int64."""
    x = (x ^ _logical_shift_right(x, 30)) * MIX1
    x = (x ^ _logical_shift_right(x, 27)) * MIX2
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right with zeros; int64's own >> extends the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample_seeds(seeds: Sequence[int], samples: int) -> list[int]:
    """Return `samples` seeds for each row, row after row; the first of each is the row's given seed."""
    given, index = torch.tensor(seeds)[:, None], torch.arange(samples)
    return torch.where(index == 0, given, splitmix64(given + index * MIX2)).flatten().tolist()
