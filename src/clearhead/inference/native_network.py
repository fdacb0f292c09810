"""A network packed for native steps: weights in the kernels' layout, and the structs that describe them.

D model dim · G key-value heads · E head dim · V vocabulary
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.model import Decoder, EncoderDecoder, Network
from clearhead.model.attention import Attention
from clearhead.model.feedforward import FeedForward
from clearhead.model.layer import Layer
from clearhead.model.norms import BatchNorm, LayerNorm, RMSNorm
from clearhead.model.positions import rope_frequencies, sinusoidal_positions
from clearhead.model.stack import Stack
from clearhead.ops.linear.packed_weight import Arena, PackedWeight
from clearhead.ops.linear.quantized import INT4
from clearhead.ops.linear.quantized_tensor import has_quantized, pack_stored
from clearhead.ops.native.structs import (
    LayerStruct,
    LinearStruct,
    NetworkStruct,
    NormStruct,
    pad_rows,
    pointer,
    step_library,
)

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu")
PATTERNS = ("full", "window", "column", "block", "summary")
KINDS = {torch.float32: "fp32", torch.float16: "fp32", torch.bfloat16: "bf16", torch.int8: "int8", INT4: "int4"}
MAX_POSITION_NUMBERS = 1 << 27  # of a table of positions, which takes 4 bytes each


def native_refuses(network: nn.Module, dtype: torch.dtype | None = None) -> str | None:
    """Return why a network cannot run as native steps in a dtype, or None if it can."""
    if step_library() is None:
        return "the native step was not compiled, or is turned off"
    if not isinstance(network, Decoder | EncoderDecoder):
        return "it is for decoders and translators"
    weight = next(network.parameters())
    if weight.device.type not in ("cpu", "meta"):  # meta: to describe a model without its weights
        return "it is for CPUs"
    if (dtype or weight.dtype) not in KINDS:
        return f"it has no kernels for {dtype or weight.dtype}"
    if network.heads.lm_head is None or type(network.heads.lm_head.proj) is not nn.Linear:
        return "the network has no plain lm_head"
    config = network.config
    if config.position == "sinusoidal" and config.max_positions * config.dim > MAX_POSITION_NUMBERS:
        return f"a table of {config.max_positions} positions is too large"
    for module in network.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return "forward hooks watch the network"
    return _parts_refuse(network)


def _parts_refuse(network: Network) -> str | None:
    """Return whether parts of the network were replaced, as in experiments or by `optimize_for_inference`."""
    plain = {Layer, Attention, FeedForward, LayerNorm, RMSNorm, BatchNorm, nn.Linear, nn.Dropout, nn.ModuleList}
    for stack in (getattr(network, "encoder", None), getattr(network, "decoder", None)):
        if stack is None:
            continue
        if type(stack) is not Stack or type(stack.embedding.tokens) is not nn.Embedding:
            return "the stack was replaced"
        for layer in stack.layers:
            for module in layer.modules():
                if type(module) not in plain:
                    return f"{type(module).__name__} has no native kernel"
    return None


class NativeNetwork:
    """The packed weights of a network; several runners may share them."""

    def __init__(
        self,
        network: Decoder | EncoderDecoder,
        dtype: torch.dtype | None = None,
        cache_dtype: torch.dtype | None = None,
    ):
        self.config, self.arena = network.config, Arena()
        self.pack = partial(pack_stored, arena=self.arena, any_kind=dtype is None)
        if dtype is None and has_quantized(network):
            dtype = torch.int8  # of its other weights
        dtype = dtype or next(network.parameters()).dtype
        self.kind = KINDS.get(dtype, "fp32")
        # The LM head's error goes into the logits, so it has 8 bits beside int4 layers.
        self.head_kind = "int8" if self.kind == "int4" else self.kind
        self.cache_dtype = cache_dtype or (torch.float32 if self.kind == "fp32" else torch.bfloat16)
        self.tensors: list[Any] = []  # kept alive for the structs
        self.embeddings: dict[int, PackedWeight] = {}  # shared ones, by their weight
        lm_head = network.heads.lm_head
        assert lm_head is not None
        head = self._embedding(lm_head.proj.weight, lm_head.proj.bias)
        self.decoder = self._stack(network.decoder, causal=True)
        self.decoder.lm_head = head.struct
        self.encoder: NetworkStruct | None = None
        self.source_kv: list[tuple[PackedWeight, Tensor | None]] = []  # with the weight of the key norm
        if isinstance(network, EncoderDecoder):
            self.encoder = self._stack(network.encoder, causal=False)
            for layer in network.decoder.layers:
                cross: Any = layer.cross_attention
                norm = None if cross.key_norm is None else cross.key_norm.weight.detach().float()
                self.source_kv.append((self._fused([cross.key, cross.value]), norm))
        self.embeddings.clear()

    def _stack(self, stack: Stack, causal: bool) -> NetworkStruct:
        config, embedding = self.config, stack.embedding
        layers = (LayerStruct * len(stack.layers))(*map(self._layer, stack.layers))
        self.tensors.append(layers)
        positions = segments = frequencies = None
        offset = embedding.position_offset
        if embedding.positions is not None:
            positions = embedding.positions.weight[offset:]
        elif embedding.sinusoid is not None:
            numbers = torch.arange(offset, offset + config.max_positions)
            positions = sinusoidal_positions(numbers[None], config.dim, embedding.sinusoid)[0]
        if embedding.segments is not None:
            segments = embedding.segments.weight[0]
        if config.position == "rotary":
            frequencies = rope_frequencies(config, torch.device("cpu"))
        tables = (self._keep(positions, padded=False), self._keep(segments), self._keep(frequencies))
        sizes = (len(layers), config.dim, config.heads, config.kv_heads, config.head_dim, config.ff_dim)
        return NetworkStruct(
            ctypes.cast(layers, ctypes.c_void_p).value,
            *(self._embedding(embedding.tokens.weight).struct, LinearStruct()),
            *(self._norm(embedding.norm), self._norm(stack.norm), *tables),
            *(*sizes, ACTIVATIONS.index(config.activation), config.norm_position == "pre", causal, 0),
            *(config.max_positions, self.cache_dtype == torch.bfloat16 and causal, embedding.scale),
        )

    def _layer(self, layer: Any) -> LayerStruct:
        attention, cross, feed_forward = layer.attention, layer.cross_attention, layer.feed_forward
        norms = (layer.attention_norm, layer.cross_norm, layer.feed_forward_norm)
        head_norms = (attention.query_norm, attention.key_norm, None if cross is None else cross.query_norm)
        gate = [] if feed_forward.gate is None else [feed_forward.gate]
        linears = [self._fused([attention.query, attention.key, attention.value]), self._fused([attention.output])]
        cross_linears = [] if cross is None else [self._fused([cross.query]), self._fused([cross.output])]
        structs = [part.struct for part in (*linears, *cross_linears)] + [LinearStruct()] * (0 if cross else 2)
        pattern = attention.pattern
        return LayerStruct(
            *map(self._norm, (*norms, *head_norms)),
            *(*structs, self._fused([*gate, feed_forward.up]).struct, self._fused([feed_forward.down]).struct),
            *(None, None, cross is not None, PATTERNS.index(pattern.kind), pattern.size, pattern.summary),
        )

    def _fused(self, linears: Sequence[nn.Linear]) -> PackedWeight:
        """Pack linears with the same input as one."""
        weight = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        packed = self.pack(weight, bias, self.kind)
        self.tensors.append(packed)
        return packed

    def _embedding(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """Pack an LM head or embedding; those that share a weight share its packed form."""
        if id(weight) not in self.embeddings:
            packed = self.pack(weight, bias, self.head_kind)
            self.embeddings[id(weight)] = packed
            self.tensors.append(packed)
        return self.embeddings[id(weight)]

    def _norm(self, norm: Any) -> NormStruct:
        if norm is None:
            return NormStruct()
        weight, bias = norm.weight, getattr(norm, "bias", None)
        if isinstance(norm, BatchNorm):  # fixed statistics
            scale = torch.rsqrt(norm.variance + norm.eps) * weight
            weight, bias = scale, (0 if bias is None else bias) - norm.mean * scale
        kind = 3 if isinstance(norm, BatchNorm) else 2 if isinstance(norm, RMSNorm) else 1
        return NormStruct(self._keep(weight), self._keep(bias), kind, norm.eps)

    def _keep(self, x: Tensor | None, padded: bool = True) -> int | None:
        """Copy a tensor to fp32 and return its address."""
        if x is None:
            return None
        copied = pad_rows(x) if padded else x.detach().float().clone(memory_format=torch.contiguous_format)
        self.tensors.append(copied)
        return pointer(copied)


def layer_structs(network: NetworkStruct) -> ctypes.Array[LayerStruct]:
    """Return the layers that a network struct points to."""
    return (LayerStruct * network.num_layers).from_address(network.layers)
