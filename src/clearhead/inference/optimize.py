"""Optimize a network for whole sequences: fuse projections, pack or quantize weights.

The optimized copy shares every tensor that it does not lay out anew with the original, which is unchanged. It can be
used like the original but for training and saving. Encoder tasks and perplexities run on it; generation packs a network
for native steps instead (`pack_for_steps`), and runs on this where they cannot run it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from clearhead.inference.fused_layers import FusedAttention, FusedFeedForward
from clearhead.model import Decoder, Network
from clearhead.model.attention import Attention
from clearhead.model.embedding import Embedding
from clearhead.model.feedforward import FeedForward
from clearhead.ops.linear.packed import PackedLinear, can_pack
from clearhead.ops.linear.packed_weight import GROUP, NativeLinear
from clearhead.ops.linear.quantized import INT4, Int8Embedding, QuantizedLinear
from clearhead.ops.malloc import tune_malloc
from clearhead.ops.native.structs import step_library

HALF_DTYPES = (torch.bfloat16, torch.float16)
AnyNetwork = TypeVar("AnyNetwork", bound=Network)


@torch.inference_mode(False)
@torch.no_grad()
def optimize_for_inference(network: AnyNetwork, dtype: torch.dtype | None = None) -> AnyNetwork:
    """Return a copy of the network optimized for inference in a dtype.

    torch.int8 means int8 weights and activations, INT4 int4 weights in groups; a decoder on a CPU then holds only
    quantized weights, including its embedding. Without a dtype the network keeps its own, except that a CPU computes in
    fp32 instead of bf16 or fp16, which are slow on many CPUs. Networks on other devices are only quantized.

    On a CPU, the process then keeps up to 1 GiB of freed memory for reuse by later batches.
    """
    weight = next(network.parameters())
    if weight.is_cpu:
        tune_malloc()
    on_cpu, quantize = weight.is_cpu, dtype in (torch.int8, INT4)
    if is_quantized(network) or not (on_cpu or quantize):
        return network
    float_dtype = torch.float32 if on_cpu and weight.dtype in HALF_DTYPES else weight.dtype
    if dtype is not None and not quantize:
        float_dtype = dtype
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    optimized = copy.deepcopy(network, shared)
    int4 = dtype == INT4
    if quantize and on_cpu and isinstance(optimized, Decoder):
        _quantize_embeddings(optimized)
    if quantize and on_cpu and step_library() is not None:
        _replace_layers(optimized, lambda linear: NativeLinear(linear, _kind(linear, int4)))
    elif quantize:
        _replace_layers(optimized, lambda linear: QuantizedLinear(linear, _bits(linear, int4)))
    elif can_pack(float_dtype):
        _replace_layers(optimized, partial(PackedLinear, dtype=float_dtype))
    else:
        _replace_layers(optimized, lambda linear: linear)
    _cast(optimized, float_dtype)
    return optimized


def _replace_layers(module: nn.Module, convert: Callable[[nn.Linear], nn.Module]) -> None:
    """Fuse attention and feed-forward, drop dropout, and convert every linear layer below `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, Attention) and type(child.query) is nn.Linear:
            child = FusedAttention(child)
        elif isinstance(child, FeedForward) and type(child.up) is nn.Linear:
            child = FusedFeedForward(child)
        elif isinstance(child, nn.Dropout):
            child = nn.Identity()
        if type(child) is nn.Linear:
            child = convert(child)
        else:
            _replace_layers(child, convert)
        if isinstance(child, FusedFeedForward) and not child.is_gated:
            if isinstance(child.down, QuantizedLinear):
                child.down.nonnegative = child.activation is torch.relu_
            if isinstance(child.up, PackedLinear) and child.activation in PackedLinear.activations:
                child.up.activation, child.activation = child.activation, _identity
        setattr(module, name, child)


def _cast(network: nn.Module, dtype: torch.dtype) -> None:
    """Cast all weights that are not quantized, as copies, since the original network has them too."""
    casted: dict[int, Tensor] = {}
    for module in network.modules():
        if isinstance(module, QuantizedLinear | NativeLinear):
            continue
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.dtype == dtype or not tensor.is_floating_point():
                continue
            if id(tensor) not in casted:
                new = tensor.detach().to(dtype)
                casted[id(tensor)] = nn.Parameter(new, False) if isinstance(tensor, nn.Parameter) else new
            setattr(module, name, casted[id(tensor)])


def _identity(x: Tensor) -> Tensor:
    return x


def _bits(linear: nn.Linear, int4: bool) -> int:
    """Return 4 for int4 if the shape of the weight allows groups, else 8."""
    return 4 if int4 and linear.in_features % GROUP == 0 and linear.out_features % 16 == 0 else 8


def _kind(linear: nn.Linear, int4: bool) -> str:
    """Return int4 or int8; the LM head is always int8, since its error goes into the logits."""
    is_lm_head = linear.out_features > 8 * linear.in_features
    return "int4" if int4 and not is_lm_head else "int8"


def _quantize_embeddings(network: nn.Module) -> None:
    """Quantize token embeddings and copy the other parameters, so that no memory-mapped file stays open."""
    for module in network.modules():
        if isinstance(module, Embedding):
            module.tokens = Int8Embedding(module.tokens)  # type: ignore[assignment]
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))


def is_quantized(network: nn.Module) -> bool:
    """Return whether the weights are int8 or int4, which cannot be undone."""
    return any(isinstance(module, QuantizedLinear | NativeLinear) for module in network.modules())


def has_hooks(network: nn.Module) -> bool:
    """Return whether forward hooks watch modules of the network, which only the network itself runs."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
