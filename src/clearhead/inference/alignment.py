"""Word alignments from cross-attention: attention weights, links, and the Moses format.

T target tokens · S source tokens · L layers · H heads
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.inference.output import GenerationOutput
from clearhead.inference.request import TokenIds
from clearhead.model import EncoderDecoder
from clearhead.model.attention import Attention
from clearhead.ops.attention.dispatch import attention_with_weights

Heads = Sequence[tuple[int, int]]  # (decoder layer, head), counted from 0; transformers' `alignment_heads`


def default_alignment_heads(config: ModelConfig) -> list[tuple[int, int]]:
    """Return the heads to align with where none were measured: all heads of one late decoder layer.

    The last layer, or the penultimate layer of deep decoders (Garg et al. 2019).
    """
    layer = config.decoder_layers - (1 if config.decoder_layers < 6 else 2)
    return [(layer, head) for head in range(config.heads)]


def cross_attention_weights(network: EncoderDecoder, source: TokenIds, target: TokenIds) -> Tensor:
    """Return the cross-attention weights (L, H, T - 1, S) with which each target token but the first was predicted.

    The weights of the step that predicts a token align it better than those of the next step, which reads it.
    """
    captured: list[Tensor] = []
    thread = threading.get_ident()

    def capture(module: Attention, args: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
        if threading.get_ident() == thread:  # other threads may run the same network
            x, mask, encoder_output = args[:3]
            q, (k, v) = module.project_q(x), module.project_kv(encoder_output)
            captured.append(attention_with_weights(q, k, v, mask)[1][0])

    device = network.decoder.embedding.tokens.weight.device
    layers = [layer.cross_attention for layer in network.decoder.layers]
    handles = [layer.register_forward_hook(capture) for layer in layers if isinstance(layer, Attention)]
    try:
        with torch.inference_mode():
            decoder_input = torch.tensor([target], device=device)[:, :-1]
            network.decode(decoder_input, network.encode(torch.tensor([source], device=device)))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(captured)


def alignment_weights(
    network: EncoderDecoder, source: TokenIds, prompt: TokenIds, target: TokenIds, heads: Heads | None = None
) -> Tensor:
    """Return the cross-attention weights (T, S), the mean over some heads, with which each target token was predicted.

    `prompt` is BOS and the prefix before the target; the prefix is aligned, too: T is len(prompt) - 1 + len(target).
    """
    if len(prompt) + len(target) < 2:
        return torch.zeros(0, len(source))
    weights = cross_attention_weights(network, source, [*prompt, *target])
    layers, numbers = zip(*(heads or default_alignment_heads(network.config)), strict=True)
    return weights[list(layers), list(numbers)].float().mean(dim=0)


def alignment_links(weights: Tensor) -> list[tuple[int, int]]:
    """Return for each target position the source position with the highest weight, as pairs (source, target)."""
    return [(source, target) for target, source in enumerate(weights.argmax(dim=-1).tolist())] if len(weights) else []


def format_alignment(links: Sequence[tuple[int, int]]) -> str:
    """Format links as Moses does: `source-target` pairs, separated by spaces, ordered by source."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def add_alignments(
    network: EncoderDecoder,
    sources: Sequence[TokenIds],
    prompts: Sequence[TokenIds],
    outputs: Sequence[Sequence[GenerationOutput]],
    heads: Heads | None = None,
) -> list[list[GenerationOutput]]:
    """Return the outputs with their alignment weights."""
    return [
        [output._replace(alignment=alignment_weights(network, source, prompt, output.ids, heads)) for output in row]
        for source, prompt, row in zip(sources, prompts, outputs, strict=True)
    ]
