"""A network for reading alone: fewer and larger matrix products, weights laid out as the kernels want them, or int8.

Put on from outside: the copy shares whatever it does not lay out anew with the network it came from, which stays as it
is. It can be used wherever the network can, as long as nothing is trained or saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from clearhead.inference.decode_layer import use_decode_layers
from clearhead.inference.fused_layers import FusedAttention, FusedFeedForward
from clearhead.model import Decoder, Network
from clearhead.model.attention import Attention
from clearhead.model.embedding import Embedding
from clearhead.model.feedforward import FeedForward
from clearhead.ops.linear.int4 import GROUP, INT4, Int4Linear
from clearhead.ops.linear.int8 import Int8Embedding, Int8Linear, has_int8_kernel
from clearhead.ops.linear.packed import PackedLinear, can_pack
from clearhead.ops.linear.quantized import QuantizedLinear
from clearhead.ops.malloc import tune_malloc

HALF = (torch.bfloat16, torch.float16)
AnyNetwork = TypeVar("AnyNetwork", bound=Network)


@torch.inference_mode(False)
@torch.no_grad()
def optimize_for_inference(network: AnyNetwork, dtype: torch.dtype | None = None) -> AnyNetwork:
    """A fast copy of the network that only reads, in this dtype; torch.int8 is int8 weights and activations.

    INT4 is int4 weights in groups. A decoder on a CPU then holds small weights alone, its embedding's too.
    Without a dtype it is the network's own but, on a CPU, float32 in the place of halves, which many CPUs compute
    slowly. On other devices the network stays as it is, but for small weights.

    On a CPU the process holds from here on what it frees, up to 1 GiB: a search needs the same room again for its next
    batch.
    """
    own = next(network.parameters())
    if own.is_cpu:
        tune_malloc()
    on_cpu, small = own.is_cpu, dtype in (torch.int8, INT4)
    if is_quantized(network) or not (on_cpu or small):
        return network
    rest = torch.float32 if on_cpu and own.dtype in HALF else own.dtype
    if dtype is not None and not small:
        rest = dtype
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    twin = copy.deepcopy(network, shared)
    if small and on_cpu and (dtype == INT4 or isinstance(twin, Decoder)) and has_int8_kernel():
        _replace(twin, partial(smaller, four=dtype == INT4))
        quantize_embeddings(twin)
    elif small:
        _replace(twin, lambda linear: QuantizedLinear(linear, bits_for(linear, dtype == INT4)))
    elif can_pack(rest):
        _replace(twin, partial(PackedLinear, dtype=rest))
    else:
        _replace(twin, lambda linear: linear)
    _turn(twin, rest)
    use_decode_layers(twin)
    return twin


def _replace(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Below `module`, join what reads the same input, and make something else of every linear layer."""
    for name, child in list(module.named_children()):
        if isinstance(child, Attention) and type(child.query) is nn.Linear:
            child = FusedAttention(child)
        elif isinstance(child, FeedForward) and type(child.up) is nn.Linear:
            child = FusedFeedForward(child)
        elif isinstance(child, nn.Dropout):
            child = nn.Identity()
        if type(child) is nn.Linear:
            child = make(child)
        else:
            _replace(child, make)
        if isinstance(child, FusedFeedForward) and not child.is_gated:
            if isinstance(child.down, QuantizedLinear):
                child.down.nonnegative = child.activation is torch.relu_
            if isinstance(child.joined, PackedLinear) and child.activation in PackedLinear.activations:
                child.joined.activation, child.activation = child.activation, _as_it_is
        setattr(module, name, child)


def _turn(network: nn.Module, dtype: torch.dtype) -> None:
    """All other weights in this dtype; those of another become copies, since the network they came from has them."""
    turned: dict[int, Tensor] = {}
    for module in network.modules():
        if isinstance(module, QuantizedLinear | Int8Linear | Int4Linear):
            continue
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.dtype == dtype or not tensor.is_floating_point():
                continue
            if id(tensor) not in turned:
                new = tensor.detach().to(dtype)
                turned[id(tensor)] = nn.Parameter(new, False) if isinstance(tensor, nn.Parameter) else new
            setattr(module, name, turned[id(tensor)])


def _as_it_is(x: Tensor) -> Tensor:
    return x


def bits_for(linear: nn.Linear, four: bool) -> int:
    """4 where that is wanted and groups fit into the rows, else 8."""
    return 4 if four and linear.in_features % GROUP == 0 and linear.out_features % 16 == 0 else 8


def smaller(linear: nn.Linear, four: bool) -> nn.Module:
    """A linear layer in small form; with `four` in 4 bits, but for the words' scores, of which all is read off."""
    words = linear.out_features > 8 * linear.in_features
    return Int4Linear(linear) if bits_for(linear, four and not words) == 4 else Int8Linear(linear)


def quantize_embeddings(network: nn.Module) -> None:
    """Token embeddings in small form, and copies of what else there is: none of it holds a file's mapping open."""
    for module in network.modules():
        if isinstance(module, Embedding):
            module.tokens = Int8Embedding(module.tokens)  # type: ignore[assignment]
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))


def is_quantized(network: nn.Module) -> bool:
    """Whether the weights are in small form, which cannot be undone."""
    return any(isinstance(module, Int8Linear | Int4Linear) for module in network.modules())
