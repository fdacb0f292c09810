"""Greedy and beam search written out without cache, batch or tree: the network reads every row anew at every step."""

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


def scores(network: Network, row: Row, new: list[int]) -> Tensor:
    """The log-probability of every next word (V,)."""
    source, prompt = row
    ids = torch.tensor([[*prompt, *new]])
    with torch.no_grad():
        if network.config.family == "encoder-decoder":
            out = network(torch.tensor([source]), ids)
        else:
            out = network(ids)
    return out[0, -1].log_softmax(dim=-1)


def search(network: Any, rows: list[Row], config: GenerationConfig, **options: Any) -> list[list[GenerationOutput]]:
    """Ours, for either family."""
    sources, prompts = [source for source, _ in rows], [prompt for _, prompt in rows]
    if network.config.family == "encoder-decoder":
        prefixes = [prompt[1:] for prompt in prompts]
        return translate(network, sources, config, begin=BEGIN, end=END, prefixes=prefixes, **options)
    return generate(network, prompts, config, end=END, **options)


def greedy(network: Network, row: Row, limit: int) -> tuple[list[int], float]:
    """The text with its end, and the sum of its log-probabilities."""
    new, total = [], 0.0
    while len(new) < limit and END not in new:
        found = scores(network, row, new)
        new.append(int(found.argmax()))
        total += float(found.max())
    return new, total


def beam(network: Network, row: Row, config: GenerationConfig) -> list[tuple[list[int], float]]:
    """The finished texts, best first, with their scores: section by section what the rules say."""
    penalty = length_penalty(config)
    running: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    for length in range(1, config.max_new_tokens + 1):
        candidates = [
            ([*new, word], total + chance)
            for new, total in running
            for word, chance in enumerate(scores(network, row, new).tolist())
        ]
        candidates = sorted(candidates, key=lambda candidate: -candidate[1])[: 2 * config.beam]
        over = length == config.max_new_tokens
        done = [(new, total / penalty(length)) for new, total in candidates[: config.beam] if over or new[-1] == END]
        finished = sorted([*finished, *done], key=lambda text: -text[1])[: config.beam]
        running = [candidate for candidate in candidates if candidate[0][-1] != END][: config.beam]
        if over or not running:
            break
        worst = finished[-1][1] if len(finished) == config.beam else -math.inf
        reach = config.max_new_tokens if config.early_stopping == "never" and config.length_penalty > 0 else length
        if config.early_stopping == "full" and worst > -math.inf:
            break
        if config.early_stopping != "full" and running[0][1] / penalty(reach) <= worst:
            break
    return finished


def length_penalty(config: GenerationConfig) -> Callable[[int], float]:
    """What a sum is divided by, from the length."""
    if config.length_form == "gnmt":
        return lambda length: ((5 + length) / 6) ** config.length_penalty
    return lambda length: length**config.length_penalty


def exhaustive(network: Network, row: Row, config: GenerationConfig, words: int) -> list[tuple[list[int], float]]:
    """Every text there is up to the limit, best first."""
    penalty, found = length_penalty(config), []

    def grow(new: list[int], total: float) -> None:
        if len(new) == config.max_new_tokens or (new and new[-1] == END):
            found.append((new, total / penalty(len(new))))
            return
        chances = scores(network, row, new).tolist()
        for word in range(words):
            grow([*new, word], total + chances[word])

    grow([], 0.0)
    return sorted(found, key=lambda text: -text[1])


def whole(output: GenerationOutput) -> list[int]:
    """The text with its end."""
    return [*output.ids, END] if output.finished else output.ids
