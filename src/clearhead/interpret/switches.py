"""Ablation: switch off heads, sublayers, layers, positions or the mask, and measure what changes.

T positions · V vocabulary or labels
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.errors import UserError
from clearhead.interpret.trace import Kind
from clearhead.model import Network
from clearhead.ops.masks import Mask

Part = Literal["head", "attention", "cross", "feed_forward", "layer", "positions", "mask"]


@dataclass(frozen=True)
class Switch:
    """A part that is switched off.

    head          its output is zero (`stack` is a kind of attention: encoder, decoder or cross)
    attention     the self-attention sublayer adds nothing; `cross` and `feed_forward` likewise
    layer         the layer passes its input on
    positions     no position encodings in this stack
    mask          attention of this stack is no longer causal
    """

    part: Part
    stack: Kind
    layer: int = 0
    head: int = 0


@dataclass(frozen=True)
class Effect:
    """What a switch changes: mean KL divergence in nats, the share of changed best tokens, and the loss, if known."""

    divergence: float
    changed: float
    loss: float | None


@contextmanager
def switched_off(network: Network, switches: Sequence[Switch]) -> Iterator[None]:
    """Run a network without some parts inside the `with`; pass an own copy (`trace.own_copy`), as hooks change it."""
    undo: list[Callable[[], None]] = []
    try:
        for switch in switches:
            _switch(network, switch, undo)
        yield
    finally:
        for each in reversed(undo):
            each()


def _switch(network: Network, switch: Switch, undo: list[Callable[[], None]]) -> None:
    stack = getattr(network, "encoder" if switch.stack == "encoder" else "decoder", None)
    if stack is None or (switch.stack == "cross" and stack.layers[0].cross_attention is None):
        raise UserError(f"{switch.stack}: this model has no such part; see the parts that it lists")
    if switch.part == "positions":
        _without_positions(stack, undo)
        return
    if switch.part == "mask":
        for layer in stack.layers:
            undo.append(layer.attention.register_forward_pre_hook(_replace_argument(1, Mask())).remove)
        return
    if not 0 <= switch.layer < len(stack.layers):
        raise UserError(f"{switch.stack} layer {switch.layer}: there are {len(stack.layers)}, counted from 0")
    layer = stack.layers[switch.layer]
    if switch.part == "layer":
        undo.append(layer.register_forward_hook(lambda _, args, output: args[0]).remove)
    elif switch.part == "head":
        attention = layer.cross_attention if switch.stack == "cross" else layer.attention
        if not 0 <= switch.head < attention.heads:
            raise UserError(f"head {switch.head}: there are {attention.heads}, counted from 0")
        undo.append(attention.output.register_forward_pre_hook(_without_head(attention.heads, switch.head)).remove)
    else:
        sublayer = {"attention": layer.attention, "cross": layer.cross_attention, "feed_forward": layer.feed_forward}
        module = sublayer[switch.part]
        if module is None:
            raise UserError(f"{switch.part}: this model has no such part; see the parts that it lists")
        undo.append(module.register_forward_hook(lambda _, args, output: torch.zeros_like(output)).remove)


def _without_head(heads: int, head: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].unflatten(-1, (heads, -1)).clone()  # (B, T, H, E)
        x[:, :, head] = 0
        return (x.flatten(-2),)

    return hook


def _replace_argument(index: int, value: Any) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value if number == index else each for number, each in enumerate(args))

    return hook


def _without_positions(stack: Any, undo: list[Callable[[], None]]) -> None:
    embedding = stack.embedding
    if embedding.positions is not None:
        undo.append(embedding.positions.register_forward_hook(lambda _, args, output: output * 0).remove)
    elif embedding.sinusoid is not None:
        before, embedding.sinusoid = embedding.sinusoid, None
        undo.append(lambda: setattr(embedding, "sinusoid", before))
    else:
        for layer in stack.layers:
            undo.append(layer.attention.register_forward_pre_hook(_replace_argument(3, None)).remove)


def all_heads(network: Network) -> list[Switch]:
    """A switch for every head."""
    return [replace(each, part="head", head=head) for each in _sublayers(network) if each.part in ("attention", "cross")
            for head in range(network.config.heads)]  # fmt: skip


def all_parts(network: Network) -> list[Switch]:
    """A switch for every sublayer, every layer, and the positions and masks of every stack."""
    stacks: list[Kind] = [name for name in ("encoder", "decoder") if hasattr(network, name)]
    config = network.config
    layers = [
        Switch("layer", stack, layer)
        for stack in stacks
        for layer in range(config.encoder_layers if stack == "encoder" else config.decoder_layers)
    ]
    positions = [Switch("positions", stack) for stack in stacks if config.position != "none"]
    masks = [Switch("mask", stack) for stack in stacks if stack == "decoder"]
    return [*_sublayers(network), *layers, *positions, *masks]


def _sublayers(network: Network) -> Iterator[Switch]:
    for name in ("encoder", "decoder"):
        stack = getattr(network, name, None)
        for number, layer in enumerate(stack.layers if stack is not None else ()):
            kind: Kind = "encoder" if name == "encoder" else "decoder"
            yield Switch("attention", kind, number)
            if layer.cross_attention is not None:
                yield Switch("cross", "cross", number)
            yield Switch("feed_forward", kind, number)


def effect_of(original: Tensor, ablated: Tensor, labels: Tensor | None) -> Effect:
    """Compare logits (T, V); `labels` (T,) are the tokens that came next, -100 where none did."""
    before, after = original.double().log_softmax(-1), ablated.double().log_softmax(-1)
    divergence = (before.exp() * (before - after)).sum(-1).mean().clamp(min=0)
    changed = (original.argmax(-1) != ablated.argmax(-1)).double().mean()
    return Effect(float(divergence), float(changed), loss_of(ablated, labels))


def loss_of(logits: Tensor, labels: Tensor | None) -> float | None:
    """Mean negative logprob of the labels (T,), in nats per token; -100 is left out."""
    if labels is None or not (labels >= 0).any():
        return None
    return float(nn.functional.cross_entropy(logits.double(), labels, ignore_index=-100))
