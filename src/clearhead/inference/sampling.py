"""Greedy choice, and sampling by temperature, top-k, top-p and min-p.   B batch · V vocabulary

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
from typing import NamedTuple, Self

import torch
from torch import Tensor

from clearhead.config import GenerationConfig
from clearhead.inference.step import SamplingInputs, StepOutput

# splitmix64 (Steele, Lea and Flood 2014): the odd increment and the two multipliers; int64 wraps around.
INCREMENT, MIX1, MIX2 = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

BLOCK = 64  # tokens of a block of the two-level search below


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


class SamplingTensors(NamedTuple):
    """`SamplingInputs` on the device, each (M,), and what the host knows about them: branches of a captured step."""

    numbers: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seeds: Tensor
    num_new: Tensor
    logprobs: int
    greedy: bool  # all rows are
    candidates: int  # tokens that top-k leaves to any row: 0 if neither top-k nor top-p is used, -1 if all may remain
    penalties: bool  # whether any row has one

    @classmethod
    def from_inputs(cls, inputs: SamplingInputs, device: torch.device) -> Self:
        """Copy the arrays to a device."""
        columns = [torch.from_numpy(getattr(inputs, name)).to(device, non_blocking=True) for name in COLUMNS]
        return cls(*columns, inputs.logprobs, *sampling_features(inputs))  # type: ignore[call-arg, arg-type]


def sampling_features(inputs: SamplingInputs) -> tuple[bool, int, bool]:
    """Return `greedy`, `candidates` and `penalties` of SamplingTensors."""
    sampled = inputs.temperature > 0
    top_k, filtered = inputs.top_k[sampled], (inputs.top_k[sampled] > 0) | (inputs.top_p[sampled] < 1)
    candidates = int(top_k.max(initial=0)) if (top_k > 0).all() else -1 if filtered.any() else 0
    unpenalized = (inputs.repetition_penalty == 1).all() and not inputs.presence_penalty.any()
    return not sampled.any(), candidates, not (unpenalized and not inputs.frequency_penalty.any())


COLUMNS = SamplingTensors._fields[: SamplingTensors._fields.index("logprobs")]


class TokenCounts:
    """Tokens seen by each row, for penalties; V columns for each of `max_rows` row numbers."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device):
        self.prompt = torch.zeros(max_rows, vocab_size, dtype=torch.bool, device=device)
        self.new = torch.zeros(max_rows, vocab_size, dtype=torch.int32, device=device)

    def start(self, number: int, prompt: Sequence[int], new: Sequence[int]) -> None:
        """Begin a row with its prompt and, if it is resumed, its new tokens."""
        device, tokens = self.new.device, len(self.new[number])
        self.prompt[number] = False
        self.prompt[number, torch.tensor(prompt, device=device)] = True
        self.new[number] = torch.bincount(torch.tensor(new, dtype=torch.long, device=device), minlength=tokens)

    def add(self, numbers: Tensor, tokens: Tensor) -> None:
        """Count a new token (M,) of some rows."""
        self.new.index_put_((numbers, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)


class Choice(NamedTuple):
    """Chosen tokens on the device; the fields are those of StepOutput."""

    tokens: Tensor  # (M,)
    finite: Tensor  # (M,)
    logprobs: Tensor | None = None  # (M,)
    top_tokens: Tensor | None = None  # (M, n)
    top_logprobs: Tensor | None = None  # (M, n)

    def output(self) -> StepOutput:
        """Copy to the host, which waits for the device."""
        return StepOutput(*(None if x is None else x.tolist() for x in self))  # type: ignore[arg-type]


def choose_tokens(logits: Tensor, inputs: SamplingTensors, counts: TokenCounts | None = None) -> Choice:
    """Choose a token for each row of logits (M, V); nothing waits for the device.

    The choice of a row depends on its own logits and options only. `counts` is needed for penalties, and updated.
    """
    finite, raw = logits.amax(dim=-1).isfinite(), logits
    if inputs.penalties:
        assert counts is not None, "penalties need the tokens of each row"
        logits = penalize(logits, inputs, counts)
    tokens = argmax(logits) if inputs.greedy else _sample(logits, inputs)
    if counts is not None:
        counts.add(inputs.numbers, tokens)
    return Choice(tokens, finite, *token_logprobs(raw, tokens, inputs.logprobs))


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the logprobs of tokens (M,), and the `top` most likely tokens with theirs (M, n); -1: none at all."""
    if top < 0:
        return None, None, None
    logprobs = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    if top == 0:
        return chosen, None, None
    best = logprobs.topk(min(top, logits.shape[1]), dim=-1)
    return chosen, best.indices, best.values


def penalize(logits: Tensor, inputs: SamplingTensors, counts: TokenCounts) -> Tensor:
    """Apply the repetition, presence and frequency penalties to logits (M, V)."""
    new = counts.new[inputs.numbers]
    seen = (new > 0) | counts.prompt[inputs.numbers]
    repetition = torch.where(seen, inputs.repetition_penalty[:, None], 1).to(logits.dtype)
    logits = torch.where(logits < 0, logits * repetition, logits / repetition)
    presence = inputs.presence_penalty[:, None] * (new > 0)
    return logits - (presence + inputs.frequency_penalty[:, None] * new).to(logits.dtype)


def _sample(logits: Tensor, inputs: SamplingTensors) -> Tensor:
    """Return a sample (M,) of the filtered softmax of each row, or the argmax where the temperature is 0."""
    is_greedy = (inputs.temperature == 0)[:, None]
    scaled = logits / torch.where(is_greedy, 1, inputs.temperature[:, None]).to(logits.dtype)
    noise = gumbel_noise(inputs.seeds, inputs.num_new, torch.arange(logits.shape[1], device=logits.device))
    sampled = (scaled + noise).masked_fill(scaled < sampling_threshold(scaled, inputs), -math.inf)
    return torch.where(is_greedy, logits, sampled).argmax(dim=-1)


def sampling_threshold(scaled: Tensor, inputs: SamplingTensors) -> Tensor:
    """Return the lowest logit (M, 1) that top-k, top-p and min-p keep of logits (M, V) divided by the temperature.

    Tokens with equal logits are kept or dropped together, so the order in which they are sorted does not matter.
    """
    threshold = scaled.amax(dim=-1, keepdim=True) + inputs.min_p.log().to(scaled.dtype)[:, None]
    if inputs.candidates == 0:
        return threshold
    count = scaled.shape[1] if inputs.candidates < 0 else min(inputs.candidates, scaled.shape[1])
    ordered = scaled.topk(count, dim=-1).values  # (M, C)
    rank = torch.arange(count, device=scaled.device)
    ordered = ordered.masked_fill(rank >= torch.where(inputs.top_k > 0, inputs.top_k, count)[:, None], -math.inf)
    probs = ordered.softmax(dim=-1, dtype=torch.float64)  # so exact that C does not matter to the sums
    kept = (probs.cumsum(dim=-1) - probs < inputs.top_p[:, None]) | (inputs.top_p[:, None] == 1)
    kept &= ordered > -math.inf
    return threshold.maximum(ordered.masked_fill(~kept, math.inf).amin(dim=-1, keepdim=True))


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
    """Return Gumbel noise (B, V) for tokens (V,) or (B, V) from seeds (B,) and numbers of new tokens (B,).

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
