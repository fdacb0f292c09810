"""Reference greedy, beam and exhaustive search without KV cache or batching: every step runs the whole sequence."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.config import GenerationConfig
from clearhead.inference import GenerationOutput, generate, translate
from clearhead.model import Network

END, BEGIN = 0, 1
Row = tuple[list[int], list[int]]  # source (empty for a decoder) and prompt
Hypothesis = tuple[list[int], float]  # tokens, EOS included, and score


def next_logprobs(network: Network, row: Row, new: list[int]) -> Tensor:
    """Return the logprobs (V,) of the next token."""
    source, prompt = row
    ids = torch.tensor([[*prompt, *new]])
    with torch.no_grad():
        if network.config.family == "encoder-decoder":
            logits = network(torch.tensor([source]), ids)
        else:
            logits = network(ids)
    return logits[0, -1].log_softmax(dim=-1)


def search(network: Any, rows: list[Row], config: GenerationConfig, **options: Any) -> list[list[GenerationOutput]]:
    """Run `generate` or `translate` of the package."""
    sources, prompts = [source for source, _ in rows], [prompt for _, prompt in rows]
    if network.config.family == "encoder-decoder":
        prefixes = [prompt[1:] for prompt in prompts]
        return translate(network, sources, config, bos_id=BEGIN, eos_ids=END, prefixes=prefixes, **options)
    return generate(network, prompts, config, eos_ids=END, **options)


def greedy_search(network: Network, row: Row, max_new_tokens: int) -> Hypothesis:
    """Return the tokens of greedy search and the sum of their logprobs."""
    new, total = [], 0.0
    while len(new) < max_new_tokens and END not in new:
        logprobs = next_logprobs(network, row, new)
        new.append(int(logprobs.argmax()))
        total += float(logprobs.max())
    return new, total


def beam_search(network: Network, row: Row, config: GenerationConfig) -> list[Hypothesis]:
    """Return the finished hypotheses, best first."""
    penalty = length_penalty(config)
    running: list[Hypothesis] = [([], 0.0)]
    finished: list[Hypothesis] = []
    for length in range(1, config.max_new_tokens + 1):
        candidates = [
            ([*new, token], total + logprob)
            for new, total in running
            for token, logprob in enumerate(next_logprobs(network, row, new).tolist())
        ]
        candidates = sorted(candidates, key=lambda candidate: -candidate[1])[: 2 * config.beam]
        at_limit = length == config.max_new_tokens
        ended = [
            (new, total / penalty(length)) for new, total in candidates[: config.beam] if at_limit or new[-1] == END
        ]
        finished = sorted([*finished, *ended], key=lambda hypothesis: -hypothesis[1])[: config.beam]
        running = [candidate for candidate in candidates if candidate[0][-1] != END][: config.beam]
        if at_limit or not running:
            break
        worst = finished[-1][1] if len(finished) == config.beam else -math.inf
        best_length = (
            config.max_new_tokens if config.early_stopping == "never" and config.length_penalty > 0 else length
        )
        if config.early_stopping == "full" and worst > -math.inf:
            break
        if config.early_stopping != "full" and running[0][1] / penalty(best_length) <= worst:
            break
    return finished


def length_penalty(config: GenerationConfig) -> Callable[[int], float]:
    """Return the function from the length to the divisor of a sum of logprobs."""
    if config.length_form == "gnmt":
        return lambda length: ((5 + length) / 6) ** config.length_penalty
    return lambda length: length**config.length_penalty


def exhaustive_search(network: Network, row: Row, config: GenerationConfig, vocab_size: int) -> list[Hypothesis]:
    """Return every sequence up to max_new_tokens, best first."""
    penalty, hypotheses = length_penalty(config), []

    def extend(new: list[int], total: float) -> None:
        if len(new) == config.max_new_tokens or (new and new[-1] == END):
            hypotheses.append((new, total / penalty(len(new))))
            return
        logprobs = next_logprobs(network, row, new).tolist()
        for token in range(vocab_size):
            extend([*new, token], total + logprobs[token])

    extend([], 0.0)
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis[1])


def with_eos(output: GenerationOutput) -> list[int]:
    """Return the ids of an output, EOS included."""
    return [*output.ids, END] if output.finished else output.ids
