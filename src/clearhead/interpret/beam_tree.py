"""Beam search with its whole tree, and greedy search, on the reference network without a cache.

S source tokens · T target tokens · K beams · V vocabulary

The rules are those of `inference.beam_search`: 2K candidates a step, the best K may finish, the best K unfinished
continue, and the length of a hypothesis includes EOS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.model import EncoderDecoder, Network

Logits = Callable[[Tensor], Tensor]  # ids (K, T) to logits (K, T, V)


@dataclass
class Node:
    """A token of the tree: `score` is the sum of logprobs from the root, `state` what became of the branch.

    kept      it was continued
    finished  it ended as a hypothesis; `penalized` is its score over the length penalty
    pruned    it was among the best 2K candidates of its step, but not continued
    """

    parent: int  # -1: the prompt
    step: int
    token: int
    logprob: float
    score: float
    state: str
    penalized: float | None = None
    best: bool = False  # on the path of the best hypothesis


@dataclass
class BeamTree:
    """All nodes in the order they were found, and the hypotheses as node numbers, best first."""

    nodes: list[Node] = field(default_factory=list)
    hypotheses: list[int] = field(default_factory=list)

    def path(self, number: int) -> list[int]:
        """The tokens from the root to a node."""
        tokens = []
        while number >= 0:
            tokens.append(self.nodes[number].token)
            number = self.nodes[number].parent
        return tokens[::-1]


def logits_of(network: Network, source: Tensor | None) -> Logits:
    """The logits of target ids (K, T) after one source (1, S); a decoder has no source."""
    if not isinstance(network, EncoderDecoder):
        return lambda ids: network.logits(network.decode(ids))  # type: ignore[operator]
    assert source is not None
    encoded = network.encode(source)

    def logits(ids: Tensor) -> Tensor:
        rows = type(encoded)(encoded.hidden_states.expand(len(ids), -1, -1), None, None)
        return network.logits(network.decode(ids, rows))

    return logits


@torch.no_grad()
def beam_tree(
    logits: Logits,
    prompt: Sequence[int],
    eos_ids: Sequence[int],
    *,
    beam: int,
    steps: int,
    length_penalty: float = 1.0,
    banned: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> BeamTree:
    """Search at most `steps` tokens after the prompt; a beam that reaches them is a hypothesis, too."""
    tree, finished = BeamTree(), list[tuple[float, int]]()
    beams: list[int] = [-1]  # node numbers
    for step in range(1, steps + 1):
        ids = torch.tensor([[*prompt, *tree.path(number)] for number in beams], device=device)
        logprobs = logits(ids)[:, -1].log_softmax(-1)
        if banned:
            logprobs[:, list(banned)] = -math.inf
        before = logprobs.new_tensor([tree.nodes[number].score if number >= 0 else 0.0 for number in beams])
        sums = (before[:, None] + logprobs).flatten()
        values, index = sums.topk(min(2 * beam, len(sums)))
        continued: list[int] = []
        for rank, (value, place) in enumerate(zip(values.tolist(), index.tolist(), strict=True)):
            row, token = divmod(place, logprobs.shape[1])
            if value == -math.inf:
                continue
            ends = token in eos_ids or step == steps
            state = "pruned"
            if ends and rank < beam:
                state = "finished"
            elif not ends and len(continued) < beam:
                state = "kept"
            node = Node(beams[row], step, token, float(logprobs[row, token]), value, state)
            tree.nodes.append(node)
            if state == "finished":
                node.penalized = value / step**length_penalty
                finished.append((node.penalized, len(tree.nodes) - 1))
            elif state == "kept":
                continued.append(len(tree.nodes) - 1)
        finished = sorted(finished, key=lambda pair: -pair[0])[:beam]
        beams = continued
        best_open = tree.nodes[beams[0]].score / step**length_penalty if beams else -math.inf
        if not beams or (beam == 1 and finished) or (len(finished) == beam and best_open <= finished[-1][0]):
            break
    tree.hypotheses = [number for _, number in finished]
    number = tree.hypotheses[0] if tree.hypotheses else -1
    while number >= 0:
        tree.nodes[number].best = True
        number = tree.nodes[number].parent
    return tree


@torch.no_grad()
def greedy(
    logits: Logits, prompt: Sequence[int], eos_ids: Sequence[int], steps: int, device: torch.device | str = "cpu"
) -> list[int]:
    """The most likely token at every step, without the end; `eos_ids` may be empty to go on for all steps."""
    ids = list(prompt)
    for _ in range(steps):
        token = int(logits(torch.tensor([ids], device=device))[0, -1].argmax())
        if token in eos_ids:
            break
        ids.append(token)
    return ids[len(prompt) :]
