"""Translator decode layers for the CPU: one token for each row or beam, with few operations around the matmuls.

B batch · K beams (1 without beam search) · H heads · E head dim · D model dim · S keys · N outputs of a linear
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.config import ModelConfig
from clearhead.inference.fused_layers import FusedAttention, FusedFeedForward
from clearhead.model.attention import Rope
from clearhead.model.cache import LayerKVCache
from clearhead.model.layer import Layer
from clearhead.model.norms import LayerNorm
from clearhead.ops.attention.sdpa import bf16_attention, small_q_attention
from clearhead.ops.linear.quantized import QuantizedLinear, has_onednn_int8
from clearhead.ops.masks import Mask
from clearhead.ops.native import library as native
from clearhead.ops.native.library import GemmOutput, NormParams, QuantizedRows

LINEARS = 7  # of a layer: qkv and output, cross-attention's query, kv and output, up and down


class MaskCache:
    """The attention bias of a step, computed by the first layer and shared by all."""

    def __init__(self) -> None:
        self.cached: tuple[Tensor | None, Tensor | None] = (None, None)

    def padding_bias(self, lengths: Tensor | None, keys: int) -> Tensor | None:
        """Return a bias (B, 1, 1, S), -inf after the source lengths (B,)."""
        cached = self.cached  # read once: workers share the network, and each has a step of its own
        if cached[0] is not lengths:
            bias = None if lengths is None else _bias(torch.arange(keys) >= lengths[:, None, None, None])
            cached = self.cached = (lengths, bias)
        return cached[1]

    def tree_bias(self, tree_mask: Tensor | None, keys: int) -> Tensor | None:
        """Return a bias (B, 1, K, S), -inf where the tree mask (B, K, up to S) is False, and after it."""
        cached = self.cached
        if cached[0] is not tree_mask:
            bias = None
            if tree_mask is not None:
                bias = _bias(F.pad(~tree_mask[:, None], (0, keys - tree_mask.shape[2]), value=True))
            cached = self.cached = (tree_mask, bias)
        return cached[1]


def _bias(masked: Tensor) -> Tensor:
    return torch.zeros(masked.shape).masked_fill_(masked, -math.inf)


class TranslatorDecodeLayer(Layer):
    """A decoder layer with cross-attention and LayerNorm, without RoPE, for one new token in each row or beam.

    All rows have the same length; the beams of a row share its source.
    """

    def __init__(self, layer: Layer, padding_masks: MaskCache, tree_masks: MaskCache):
        nn.Module.__init__(self)
        self.pre, self.padding_masks, self.tree_masks, self.training = (
            layer.pre,
            padding_masks,
            tree_masks,
            layer.training,
        )
        self.attention, self.attention_norm = layer.attention, layer.attention_norm
        self.cross_attention, self.cross_norm, self.dropout = layer.cross_attention, layer.cross_norm, layer.dropout
        self.feed_forward, self.feed_forward_norm = layer.feed_forward, layer.feed_forward_norm
        attention, cross, feed_forward = (
            cast(Any, part) for part in (self.attention, self.cross_attention, self.feed_forward)
        )
        # A tuple avoids Module.__getattr__, and `forward` the overhead of Module.__call__.
        self.linears = (attention.qkv, attention.output, cross.query, cross.output, feed_forward.up, feed_forward.down)
        self.heads, self.activation = attention.heads, feed_forward.activation
        norms = (cast(Any, norm) for norm in (self.attention_norm, self.cross_norm, self.feed_forward_norm))
        self.norms = tuple((norm.normalized_shape, norm.weight, norm.bias, norm.eps) for norm in norms)

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        rope: Rope | None = None,
        encoder_output: Tensor | None = None,
        cross_mask: Mask | None = None,
        cache: LayerKVCache | None = None,
        norm_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, K, D) to (B, K, D)."""
        tree, (rows, tokens, dim) = mask.tree, x.shape
        is_step = tree is not None or (tokens == 1 and isinstance(mask.start, int))
        if cache is None or cache.source is None or not is_step or x.dtype != torch.float32:
            return super().forward(x, mask, rope, encoder_output, cross_mask, cache, norm_mask)
        assert cross_mask is not None
        qkv, output, cross_query, cross_output, up, down = self.linears
        state = self._begin(x.reshape(rows * tokens, dim))
        tree_mask = None if tree is None else tree.mask
        heads = self._self_attention(self._project(state, 0, qkv), cache, tree_mask, rows)
        state = self._add_output(state, 0, output, heads)
        heads = self._cross_attention(self._project(state, 1, cross_query), cache.source, cross_mask.lengths)
        state = self._add_output(state, 1, cross_output, heads)
        state = self._add_output(state, 2, down, self._up(state, up))
        return self._end(state).view(rows, tokens, dim)

    # The operations between the matmuls. `state` is the residual stream (B·K, D).

    def _begin(self, flat: Tensor) -> Any:
        return flat

    def _end(self, state: Any) -> Tensor:
        return state

    def _project(self, state: Any, sublayer: int, linear: Any) -> Any:
        """Apply the norm of the sublayer, if pre-norm, and a linear layer: (B·K, N)."""
        return linear.forward(torch.layer_norm(state, *self.norms[sublayer]) if self.pre else state)

    def _add_output(self, state: Any, sublayer: int, linear: Any, x: Any) -> Any:
        """Apply the last linear of a sublayer and add the result to the residual stream."""
        x = linear.forward(x).add_(state)
        return x if self.pre else torch.layer_norm(x, *self.norms[sublayer])

    def _up(self, state: Any, up: Any) -> Any:
        return self.activation(self._project(state, 2, up))

    def _self_attention(self, qkv: Any, cache: LayerKVCache, tree_mask: Tensor | None, rows: int) -> Any:
        """Add keys and values of qkv (B·K, 3·D) to the cache and attend; heads are merged in the result (B·K, D).

        The tree mask (B, K, up to S) is True for visible keys; None means all.
        """
        q, k, v = qkv.view(rows, len(qkv) // rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (B, H, K, E)
        keys, values = cache.extend(k, v)
        return self._attend(q, keys, values, self.tree_masks.tree_bias(tree_mask, keys.shape[2]))

    def _cross_attention(self, q: Any, source: tuple[Tensor, Tensor], lengths: Tensor | None) -> Any:
        """Attend with q (B·K, D) to the source's keys and values (B, H, S, E); the result is (B·K, D)."""
        rows, heads, keys, dim = source[0].shape
        q = q.view(rows, len(q) // rows, heads, dim).transpose(1, 2)
        return self._attend(q, *source, self.padding_masks.padding_bias(lengths, keys))

    @staticmethod
    def _attend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        attention = bf16_attention if keys.dtype == torch.bfloat16 else small_q_attention
        heads = attention(q, keys, values, bias).view(q.shape).transpose(1, 2)
        return heads.to(q.dtype, memory_format=torch.contiguous_format).reshape(len(q) * q.shape[2], -1)


class ResidualState(NamedTuple):
    """The residual stream, and the input of the next linear layer (normalized, quantized, or both)."""

    residual: Tensor  # (B·K, D)
    linear_input: Tensor | QuantizedRows


class NativeTranslatorDecodeLayer(TranslatorDecodeLayer):
    """The same with native code between the matmuls, which fuses residual, norm and quantization in one pass."""

    def __init__(self, layer: Layer, padding_masks: MaskCache, tree_masks: MaskCache):
        super().__init__(layer, padding_masks, tree_masks)
        self.quantized = isinstance(self.linears[0], QuantizedLinear)
        self.norm_params = tuple(NormParams(weight.detach(), _detach(bias), eps) for _, weight, bias, eps in self.norms)

    def _begin(self, flat: Tensor) -> ResidualState:
        flat = flat.contiguous()
        norm, output = self.norm_params[0] if self.pre else None, GemmOutput(flat)
        if self.quantized:
            return ResidualState(flat, native.quantize(output, norm=norm))
        if norm is None:
            return ResidualState(flat, flat)
        normed = torch.empty_like(flat)
        native.residual_norm_quantize(output, norm=norm, normed_out=normed)
        return ResidualState(flat, normed)

    def _end(self, state: ResidualState) -> Tensor:
        return state.residual

    def _linear(self, linear: Any, x: Any) -> GemmOutput:
        return linear.packed().matmul(x) if self.quantized else GemmOutput(linear.forward(x))

    def _project(self, state: ResidualState, sublayer: int, linear: Any) -> GemmOutput:
        return self._linear(linear, state.linear_input)

    def _add_output(self, state: ResidualState, sublayer: int, linear: Any, x: Any) -> ResidualState:
        output, residual = self._linear(linear, x), state.residual
        sums = output.values  # updated in place to the new residual stream
        if self.pre and sublayer == 2:  # the norm that follows is the next layer's
            native.residual_norm_quantize(output, residual, sum_out=sums)
            return ResidualState(sums, sums)
        quantized = native.empty_quantized_rows(*sums.shape) if self.quantized else None
        if not self.pre:
            normed, norm = torch.empty_like(sums), self.norm_params[sublayer]
            native.residual_norm_quantize(output, residual, norm=norm, normed_out=normed, quantized_out=quantized)
            return ResidualState(normed, quantized or normed)
        norm = self.norm_params[sublayer + 1]
        if quantized is not None:
            native.residual_norm_quantize(output, residual, norm=norm, sum_out=sums, quantized_out=quantized)
            return ResidualState(sums, quantized)
        normed = torch.empty_like(sums)
        native.residual_norm_quantize(output, residual, norm=norm, sum_out=sums, normed_out=normed)
        return ResidualState(sums, normed)

    def _up(self, state: ResidualState, up: Any) -> Tensor | QuantizedRows:
        if not self.quantized:
            return self.activation(up.forward(state.linear_input))
        output, relu = self._linear(up, state.linear_input), self.activation is torch.relu_
        return native.quantize(output if relu else GemmOutput(self.activation(native.dequantize(output))), relu)

    def _self_attention(
        self, qkv: GemmOutput, cache: LayerKVCache, tree_mask: Tensor | None, rows: int
    ) -> Tensor | QuantizedRows:
        assert isinstance(cache.slot_ids, slice)  # all rows have the same length
        cache.grow()
        return self._native_attend(qkv, *cache.read(), tree_mask, None, cache.slot_ids.start)

    def _cross_attention(
        self, q: GemmOutput, source: tuple[Tensor, Tensor], lengths: Tensor | None
    ) -> Tensor | QuantizedRows:
        return self._native_attend(q, *source, None, lengths, None)

    def _native_attend(
        self,
        q_or_qkv: GemmOutput,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        lengths: Tensor | None,
        first_slot: int | None,
    ) -> Tensor | QuantizedRows:
        """Attend natively; with `first_slot`, the keys and values of qkv are stored from that slot on first."""
        rows, dim = len(q_or_qkv.values), keys.shape[1] * keys.shape[3]
        quantized = native.empty_quantized_rows(rows, dim) if self.quantized else None
        heads = native.attend(q_or_qkv, keys, values, mask, lengths, first_slot, quantized)
        return quantized or heads


def translator_decode_layers(config: ModelConfig, layers: list[Any]) -> list[Layer] | None:
    """Return decode layers for the layers of a stack, or None if they are not supported."""
    if config.position == "rotary" or not all(_supports(layer) for layer in layers):
        return None
    kind = NativeTranslatorDecodeLayer if _supports_native(config, layers) else TranslatorDecodeLayer
    padding_masks, tree_masks = MaskCache(), MaskCache()
    return [kind(layer, padding_masks, tree_masks) for layer in layers]


def _supports_native(config: ModelConfig, layers: list[Any]) -> bool:
    """Return whether native code is available for these dims and, if weights are quantized, for all of them in int8."""
    quantized = [module for layer in layers for module in layer.modules() if isinstance(module, QuantizedLinear)]
    if quantized and not (len(quantized) == len(layers) * LINEARS and all(linear.bits == 8 for linear in quantized)):
        return False
    dims = (config.dim, config.heads * config.head_dim, config.head_dim, config.ff_dim)
    return native.supports(*dims) and (not quantized or has_onednn_int8())


def _supports(layer: Layer) -> bool:
    attention, cross, feed_forward = layer.attention, layer.cross_attention, layer.feed_forward
    norms = (layer.attention_norm, layer.cross_norm, layer.feed_forward_norm)
    if not all(
        isinstance(norm, LayerNorm) and norm.weight.dtype == torch.float32 and norm.weight.is_cpu for norm in norms
    ):
        return False
    if not isinstance(attention, FusedAttention) or not isinstance(cross, FusedAttention):
        return False
    full = attention.pattern.kind == "full" and attention.heads == attention.kv_heads and attention.query_norm is None
    return full and isinstance(feed_forward, FusedFeedForward) and not feed_forward.is_gated


def _detach(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
