"""Word alignments from cross-attention: attention weights, links, and the Moses format.

T target tokens · S source tokens · H heads
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.inference.model_runner import TokenIds
from clearhead.inference.output import GenerationOutput
from clearhead.model import EncoderDecoder
from clearhead.model.attention import Attention
from clearhead.ops.attention.dispatch import attention_with_weights


def alignment_weights(
    network: EncoderDecoder, source: TokenIds, prompt: TokenIds, target: TokenIds, layer: int = -2
) -> Tensor:
    """Return the cross-attention weights (T, S) of one decoder layer with which each target token was predicted.

    They are the mean over the heads. `prompt` is BOS and the prefix before the target, if any. The penultimate layer
    aligns best (Garg et al. 2019).
    """
    layers = network.decoder.layers
    cross_attention = layers[max(layer, -len(layers))].cross_attention
    assert isinstance(cross_attention, Attention)
    captured: list[Tensor] = []

    def capture(module: Attention, args: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
        x, mask, encoder_output = args[:3]
        q, (k, v) = module.project_q(x), module.project_kv(encoder_output)
        captured.append(attention_with_weights(q, k, v, mask)[1])

    device = network.decoder.embedding.tokens.weight.device
    handle = cross_attention.register_forward_hook(capture)
    try:
        with torch.inference_mode():
            decoder_input = torch.tensor([[*prompt, *target]], device=device)[:, :-1]
            network.decode(decoder_input, network.encode(torch.tensor([source], device=device)))
    finally:
        handle.remove()
    return captured[0][0].mean(dim=0)[len(prompt) - 1 :]  # (H, P + T - 1, S) to (T, S)


def alignment_links(weights: Tensor) -> list[tuple[int, int]]:
    """Return for each target token the source token with the highest weight, as pairs (source, target)."""
    return [(source, target) for target, source in enumerate(weights.argmax(dim=-1).tolist())] if len(weights) else []


def format_alignment(links: Sequence[tuple[int, int]]) -> str:
    """Format links as Moses does: `source-target` pairs, separated by spaces, ordered by source."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def add_alignments(
    network: EncoderDecoder,
    sources: Sequence[TokenIds],
    prompts: Sequence[TokenIds],
    outputs: Sequence[Sequence[GenerationOutput]],
) -> list[list[GenerationOutput]]:
    """Return the outputs with their alignment weights."""
    return [
        [output._replace(alignment=alignment_weights(network, source, prompt, output.ids)) for output in row]
        for source, prompt, row in zip(sources, prompts, outputs, strict=True)
    ]
