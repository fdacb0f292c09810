"""A decoder on a GPU: fused weights and Triton kernels over flat tokens and a paged KV cache.

N tokens · M outputs · D model dim · F feed-forward dim · H heads · G key-value heads · E head dim · V vocabulary

Norms and embeddings are the network's own. Fused weights replace the parts, which become views of them, so no weight is
stored twice. One row is bound by reading weights: each linear layer is a kernel with all that stands around it. More
rows use cuBLAS, for which quantized weights are dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.inference.optimize import has_hooks
from clearhead.inference.step import PagedKVCache
from clearhead.model import Decoder, EncoderDecoder, Network
from clearhead.model.norms import BatchNorm, RMSNorm
from clearhead.model.positions import rope_frequencies
from clearhead.ops.linear.weight_only import WeightOnlyLinear, finish_linear
from clearhead.ops.triton import linear as ops
from clearhead.ops.triton.paged_attention import (
    BlockTables,
    QueryTiles,
    chunk_attention,
    cross_attention,
    decode_attention,
    paged_attention_supports,
    rotate_and_write,
)

GATED = {"swiglu": "silu", "geglu": "gelu"}  # activation of the gate
MAX_QUANTIZED_ROWS = 4  # above, quantized weights are dequantized first


class DeviceStep(NamedTuple):
    """The inputs of a step on the device."""

    ids: Tensor  # (N,)
    rope: tuple[Tensor, Tensor] | None  # (N, E/2) each
    positions: Tensor  # (N,)
    slots: Tensor  # (N,)
    tables: BlockTables
    tiles: QueryTiles | None  # None: every row has one token, in the order of the rows
    outputs: Tensor | None  # (M,); None: all tokens
    source_tables: BlockTables | None = None
    source_lengths: Tensor | None = None  # (R,)


class CudaNorm:
    """A norm, of which linear layers and kernels take the weight if it is an RMSNorm."""

    def __init__(self, norm: Any):
        self.norm, self.is_rms = norm, isinstance(norm, RMSNorm)
        if self.is_rms:
            self.eps = float(norm.eps)
            self.weight: Tensor = norm.weight.detach()
            self.fp32 = self.weight.float()

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, D) to (N, D)."""
        if self.is_rms:
            return ops.rms_norm(x, self.weight, self.eps, dependent=True)
        return self.norm(x.to(self.norm.weight.dtype))


class CudaLayer:
    """The weights of a layer."""

    def __init__(self, layer: Any, activation: str, bits: int):
        attention, cross, feed_forward = layer.attention, layer.cross_attention, layer.feed_forward
        self.qkv = fuse([attention.query, attention.key, attention.value], bits)
        self.output = fuse([attention.output], bits)
        self.head_norms = attention.query_norm, attention.key_norm
        self.attention_norm, self.feed_forward_norm = CudaNorm(layer.attention_norm), CudaNorm(layer.feed_forward_norm)
        self.is_cross = cross is not None
        if cross is not None:
            self.cross_norm = CudaNorm(layer.cross_norm)
            self.cross_query, self.cross_output = fuse([cross.query], bits), fuse([cross.output], bits)
        parts = [part for part in (feed_forward.gate, feed_forward.up) if part is not None]
        self.up = fuse(parts, bits, GATED.get(activation, activation), len(parts) == 2)
        self.down = fuse([feed_forward.down], bits)


class CudaDecoder:
    """A network's decoder and LM head, for steps on a GPU."""

    def __init__(self, network: Decoder | EncoderDecoder, cache: PagedKVCache, max_rows: int, bits: int = 16):
        assert network.heads.lm_head is not None
        self.network, self.cache, config = network, cache, network.config
        self.layers = [CudaLayer(layer, config.activation, bits) for layer in network.decoder.layers]
        self.head = fuse([network.heads.lm_head.proj], 8 if bits == 4 else bits)  # its error goes into the logits
        self.norm = None if network.decoder.norm is None else CudaNorm(network.decoder.norm)
        self.is_pre_norm, self.heads, self.kv_heads = config.norm_position == "pre", config.heads, config.kv_heads
        self.frequencies = rope_frequencies(config, cache.device) if config.position == "rotary" else None
        self.bits = bits
        # Counters of split attention, zero between kernels.
        self.arrived = torch.zeros(max_rows * config.kv_heads, dtype=torch.int32, device=cache.device)

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        linears = [linear for layer in self.layers for linear in vars(layer).values()] + [self.head]
        return sum(linear.nbytes for linear in linears if isinstance(linear, WeightOnlyLinear))

    def __call__(self, step: DeviceStep, head: bool = True) -> Tensor | None:
        """Return the logits (M, V) in fp32; without the head, only fill the cache."""
        x: Tensor = self.network.decoder.embedding(step.ids[None], step.positions[None])[0]  # (N, D)
        if self._uses_row_kernels(x) and self.bits < 16:
            x = x.float()  # quantized row kernels read fp32
        for index, layer in enumerate(self.layers):
            x = self._layer(index, layer, x, step)
        if not head:
            return None
        if step.outputs is not None:
            x = x[step.outputs]
        return self._linear(x, self.head, self.norm, dtype=torch.float32)

    def _uses_row_kernels(self, x: Tensor) -> bool:
        return len(x) <= (1 if self.bits == 16 else MAX_QUANTIZED_ROWS)

    def _layer(self, index: int, layer: CudaLayer, x: Tensor, step: DeviceStep) -> Tensor:
        """x (N, D) to (N, D)."""
        x = self._sublayer(
            x, layer.qkv, layer.output, layer.attention_norm, lambda h: self._attend(index, layer, h, step)
        )
        if layer.is_cross:
            query, output, norm = layer.cross_query, layer.cross_output, layer.cross_norm
            x = self._sublayer(x, query, output, norm, lambda h: self._attend_source(index, h, step))
        return self._sublayer(x, layer.up, layer.down, layer.feed_forward_norm)

    def _sublayer(
        self,
        x: Tensor,
        first: WeightOnlyLinear,
        last: WeightOnlyLinear,
        norm: CudaNorm,
        between: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Add last(between(first(norm(x)))) to x; in post-norm networks the norm comes last."""
        hidden = self._linear(x, first, norm if self.is_pre_norm else None)
        if between is not None:
            hidden = between(hidden)
        x = self._linear(hidden, last, None, x)
        return x if self.is_pre_norm else norm(x).to(x.dtype)

    def _linear(
        self,
        x: Tensor,
        linear: WeightOnlyLinear,
        norm: CudaNorm | None = None,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A linear layer with the norm before it, and its activation or the residual after it."""
        if self._uses_row_kernels(x):
            gain = None
            if norm is not None and norm.is_rms:
                gain = (norm.weight if linear.bits == 16 else norm.fp32), norm.eps
            elif norm is not None:
                x = norm(x)
            x = x if linear.bits == 16 else x.float()
            return ops.row_linear(x, linear, gain, residual, dtype=dtype, dependent=True)
        x = x if norm is None else norm(x)
        weight = ops.dequantize(linear, x.dtype)
        if dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
            logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
            return logits if linear.bias is None else logits.add_(linear.bias)
        if residual is not None and linear.bias is None:
            return torch.addmm(residual, x, weight.t())
        y = F.linear(x, weight, linear.bias)
        if linear.gated:
            return ops.gate(y, linear.activation, dependent=True)
        return finish_linear(y, linear, residual)

    def _attend(self, index: int, layer: CudaLayer, qkv: Tensor, step: DeviceStep) -> Tensor:
        """Self-attention: (N, (H + 2G)·E) to (N, H·E)."""
        heads = qkv.view(len(qkv), self.heads + 2 * self.kv_heads, -1)
        query_norm, key_norm = layer.head_norms
        if query_norm is not None and key_norm is not None:
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            heads = torch.cat([query_norm(q), key_norm(k), v], dim=1)
        pools = self.cache.keys[index], self.cache.values[index]
        if step.tiles is None:
            positions, slots = step.positions, step.slots
            out = decode_attention(heads, step.rope, *pools, step.tables, positions, slots, self.arrived, True)
        else:
            heads = heads.to(pools[0].dtype)
            rotate_and_write(heads, step.rope, *pools, step.slots)
            out = chunk_attention(heads[:, : self.heads], *pools, step.tables, step.tiles, step.positions)
        return out.flatten(1)

    def _attend_source(self, index: int, query: Tensor, step: DeviceStep) -> Tensor:
        """Cross-attention: (N, H·E) to (N, H·E)."""
        assert step.source_tables is not None
        assert step.source_lengths is not None
        queries, pools = query.view(len(query), self.heads, -1), (self.cache.keys[index], self.cache.values[index])
        tables, lengths = step.source_tables, step.source_lengths
        if step.tiles is None:
            out = cross_attention(queries, *pools, tables, lengths, self.arrived, True)
        else:
            out = chunk_attention(queries.to(pools[0].dtype), *pools, tables, step.tiles, lengths, causal=False)
        return out.flatten(1)


def unsupported(network: Network, dtype: torch.dtype) -> str | None:
    """Return why a network cannot run in a CudaDecoder, or None."""
    config = network.config
    if not isinstance(network, Decoder | EncoderDecoder) or network.heads.lm_head is None:
        return "the network has no decoder with an LM head"
    if set(config.attention) != {"full"}:
        return f"attention is {', '.join(config.attention)}, not full"
    if any(isinstance(module, BatchNorm) for module in network.decoder.modules()):
        return "the norm is batch norm"
    projections = [layer.attention.query for layer in network.decoder.layers]  # type: ignore[union-attr]
    if not all(type(module) is nn.Linear for module in (*projections, network.heads.lm_head.proj)):
        return "the weights are packed or quantized already"
    if has_hooks(network):
        return "modules have forward hooks"
    return paged_attention_supports(config.head_dim, config.heads // config.kv_heads, dtype)


@torch.no_grad()
def fuse(parts: list[Any], bits: int, activation: str = "none", gated: bool = False) -> WeightOnlyLinear:
    """Concatenate the outputs of linear layers with the same input; unless quantized, the parts become views."""
    weight = _concat([part.weight for part in parts], shared=bits == 16)
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    linear = WeightOnlyLinear(weight, bias, activation=activation, gated=gated)
    return linear if bits == 16 else linear.quantize(bits)


def _concat(tensors: list[Tensor], shared: bool) -> Tensor:
    """Concatenate along the first axis; if shared, make each tensor a view of the result."""
    if len(tensors) < 2:
        return tensors[0].detach()
    fused = torch.cat([tensor.detach() for tensor in tensors])
    if shared:
        for tensor, view in zip(tensors, fused.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.data = view
    return fused
