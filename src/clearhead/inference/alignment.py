"""Which source tokens each target token looked at: soft weights, hard links, the Moses form.

T target tokens · S source tokens · H heads
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.inference.output import GenerationOutput
from clearhead.inference.step import Ids
from clearhead.model import EncoderDecoder
from clearhead.model.attention import Attention
from clearhead.ops.attention.dispatch import attention_with_weights


def alignment_weights(network: EncoderDecoder, source: Ids, prompt: Ids, target: Ids, layer: int = -2) -> Tensor:
    """The weights (T, S) by which each target token was written, the mean over the heads of one decoder layer.

    `prompt` is what stands before the target: the begin token and a prefix, if there was one. The last layer but one
    is known to align best (Garg et al. 2019); a decoder of one layer has only that.
    """
    layers = network.decoder.layers
    cross = layers[max(layer, -len(layers))].cross_attention
    assert isinstance(cross, Attention)
    seen: list[Tensor] = []

    def look(module: Attention, args: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
        x, mask, encoder_output = args[:3]
        seen.append(attention_with_weights(module.project_q(x), *module.project_kv(encoder_output), mask)[1])

    device = network.decoder.embedding.tokens.weight.device
    handle = cross.register_forward_hook(look)
    try:
        with torch.inference_mode():
            written = torch.tensor([[*prompt, *target]], device=device)[:, :-1]  # what each target token followed
            network.decode(written, network.encode(torch.tensor([source], device=device)))
    finally:
        handle.remove()
    return seen[0][0].mean(dim=0)[len(prompt) - 1 :]  # (H, P + T, S) to (T, S)


def alignment_links(weights: Tensor) -> list[tuple[int, int]]:
    """For each target token the source token it looked at most: pairs (source, target)."""
    return [(source, target) for target, source in enumerate(weights.argmax(dim=-1).tolist())] if len(weights) else []


def format_alignment(links: Sequence[tuple[int, int]]) -> str:
    """Links as Moses writes them, `source-target` with spaces between, by source."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def with_alignments(
    network: EncoderDecoder, sources: Sequence[Ids], prompts: Sequence[Ids], found: Sequence[Sequence[GenerationOutput]]
) -> list[list[GenerationOutput]]:
    """The outputs with their soft alignments."""
    return [
        [output._replace(alignment=alignment_weights(network, source, prompt, output.ids)) for output in outputs]
        for source, prompt, outputs in zip(sources, prompts, found, strict=True)
    ]
