"""One forward pass of the reference network with everything that happened inside.

T queries · S keys · H heads · G key-value heads · E head dim · D model dim · L layers · K lens tokens
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.interpret.attention import AttentionTrace, capture_attention
from clearhead.model import Decoder, Encoder, EncoderDecoder, Network
from clearhead.model.stack import Stack

TENSORS = ("weights", "q", "k", "v", "updates", "bias", "output")


@dataclass(frozen=True)
class Tokens:
    """A sequence of token ids, and each token as a string."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class LogitLens:
    """The most likely tokens at every position if the network ended after layer l (nostalgebraist 2020).

    Each layer's hidden state goes through the final norm and lm_head; the last layer gives the network's own logits.
    """

    ids: Tensor  # (L, T, K), most likely first
    logprobs: Tensor  # (L, T, K)
    texts: tuple[tuple[tuple[str, ...], ...], ...]  # (L, T, K)


@dataclass(frozen=True, repr=False)
class Inspection:
    """Attention, Q/K/V, per-head updates and the logit lens of one text.

    `source` is the input of the encoder, `target` of the decoder; `encoder`, `decoder` and `cross` hold an
    AttentionTrace per layer without its batch dimension: weights (H, T, S), q (H, T, E), k and v (G, S, E),
    updates (H, T, D), bias (D,), output (T, D). The lens is that of the decoder, or of an encoder with an lm_head.
    """

    family: str
    source: Tokens | None
    target: Tokens | None
    encoder: tuple[AttentionTrace, ...]
    decoder: tuple[AttentionTrace, ...]
    cross: tuple[AttentionTrace, ...]
    lens: LogitLens | None

    def __repr__(self) -> str:
        sides = [f"{len(side)} {name} tokens" for name in ("source", "target") if (side := getattr(self, name))]
        layers = [f"{len(getattr(self, name))} {name} layers" for name in ("encoder", "decoder") if getattr(self, name)]
        heads = f"{len((self.encoder or self.decoder)[0].weights)} heads"
        lens = "no lens" if self.lens is None else f"lens of {self.lens.ids.shape[-1]} tokens"
        return f"Inspection({', '.join([self.family, *sides, *layers, heads, lens])})"

    def to_dict(self, tensors: Collection[str] = TENSORS) -> dict[str, Any]:
        """Nested lists in the shapes above; `tensors` selects fields of AttentionTrace, like ("weights",)."""
        lens = self.lens
        return {
            "family": self.family,
            **{name: _tokens(getattr(self, name)) for name in ("source", "target")},
            **{
                name: [
                    {each.name: _list(getattr(trace, each.name)) for each in fields(trace) if each.name in tensors}
                    for trace in getattr(self, name)
                ]
                for name in ("encoder", "decoder", "cross")
            },
            "lens": None if lens is None else _lens_lists(lens),
        }


def inspect_network(
    network: Network,
    source: Tokens | None,
    target: Tokens | None,
    decode_token: Callable[[int], str],
    *,
    top: int = 5,
    segments: Tensor | None = None,
) -> Inspection:
    """Run one pass without padding or cache; `decode_token` gives the string of a token for the lens."""
    device = next(network.parameters()).device
    source_ids, target_ids = (
        None if side is None else torch.tensor([side.ids], device=device) for side in (source, target)
    )
    lens_stack = network.encoder if isinstance(network, Encoder) else network.decoder
    with torch.no_grad(), capture_attention(network) as traces, _capture_layers(lens_stack) as hidden:
        if isinstance(network, EncoderDecoder):
            network.decode(target_ids, network.encode(source_ids))  # type: ignore[arg-type]
        elif isinstance(network, Decoder):
            network.decode(target_ids)  # type: ignore[arg-type]
        elif isinstance(network, Encoder):
            network.encode(source_ids, segments=segments)  # type: ignore[arg-type]
        lens = _lens(network, lens_stack, hidden, decode_token, top)
    encoder, decoder = ([name for name in traces if name.startswith(f"{stack}.")] for stack in ("encoder", "decoder"))
    return Inspection(
        network.config.family,
        source,
        target,
        tuple(_first_row(traces[name]) for name in encoder),
        tuple(_first_row(traces[name]) for name in decoder if not name.endswith("cross_attention")),
        tuple(_first_row(traces[name]) for name in decoder if name.endswith("cross_attention")),
        lens,
    )


@contextmanager
def _capture_layers(stack: Stack) -> Iterator[list[Tensor]]:
    """The output of every layer of a stack: L hidden states (1, T, D)."""
    hidden: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda _, __, output: hidden.append(output)) for layer in stack.layers]
    try:
        yield hidden
    finally:
        for handle in handles:
            handle.remove()


def _lens(
    network: Network, stack: Stack, hidden: list[Tensor], decode_token: Callable[[int], str], top: int
) -> LogitLens | None:
    if network.heads.lm_head is None:
        return None
    layers = [network.logits(x if stack.norm is None else stack.norm(x, None))[0] for x in hidden]  # L of (T, V)
    values, ids = zip(*(layer.float().log_softmax(-1).topk(min(top, layer.shape[-1])) for layer in layers), strict=True)
    tokens = torch.stack(ids).cpu()
    texts = tuple(tuple(tuple(map(decode_token, row)) for row in layer) for layer in tokens.tolist())
    return LogitLens(tokens, torch.stack(values).cpu(), texts)


def _first_row(trace: AttentionTrace) -> AttentionTrace:
    """The trace without its batch dimension, on the CPU."""
    rows = {name: getattr(trace, name)[0].cpu() for name in TENSORS if name != "bias"}
    return replace(trace, **rows, bias=None if trace.bias is None else trace.bias.detach().cpu())


def _tokens(side: Tokens | None) -> dict[str, Any] | None:
    return None if side is None else {"ids": list(side.ids), "texts": list(side.texts)}


def _lens_lists(lens: LogitLens) -> dict[str, Any]:
    texts = [[list(position) for position in layer] for layer in lens.texts]
    return {"ids": lens.ids.tolist(), "logprobs": lens.logprobs.tolist(), "texts": texts}


def _list(tensor: Tensor | None) -> Any:
    """A tensor as nested lists."""
    return None if tensor is None else tensor.float().tolist()
