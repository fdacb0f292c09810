"""A translator's layers that read one token a row, or one in each branch of a row: few operations around the products.

B rows · T branches · H heads · E head width · D width · S keys · N outputs
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

PRODUCTS = 7  # of a layer: to q, k and v, back; to q, to the source's k and v, back; wide, and back


class MaskCache:
    """What is hidden in one step, made by its first layer and used by all."""

    def __init__(self) -> None:
        self.held: tuple[Tensor | None, Tensor | None] = (None, None)

    def of(self, lengths: Tensor | None, keys: int) -> Tensor | None:
        """Numbers to add to scores, (B, 1, 1, S): -inf behind the lengths (B,) of sources."""
        held = self.held  # read once: workers share the network, and each has a step of its own
        if held[0] is not lengths:
            hidden = None if lengths is None else _hiding(torch.arange(keys) >= lengths[:, None, None, None])
            held = self.held = (lengths, hidden)
        return held[1]

    def off(self, paths: Tensor | None, keys: int) -> Tensor | None:
        """Numbers to add to scores, (B, 1, K, S): -inf off the paths (B, K, up to S) of branches."""
        held = self.held
        if held[0] is not paths:
            hidden = None if paths is None else _hiding(F.pad(~paths[:, None], (0, keys - paths.shape[2]), value=True))
            held = self.held = (paths, hidden)
        return held[1]


def _hiding(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)


class TranslatorDecodeLayer(Layer):
    """A decoder's layer beside a source, with LayerNorm and nothing that turns: one token in each of many rows, all of
    them equally long, or in each branch of these rows, which share a source."""

    def __init__(self, plain: Layer, unseen: MaskCache, astray: MaskCache):
        nn.Module.__init__(self)
        self.pre, self.unseen, self.astray, self.training = plain.pre, unseen, astray, plain.training
        self.attention, self.attention_norm = plain.attention, plain.attention_norm
        self.cross_attention, self.cross_norm, self.dropout = plain.cross_attention, plain.cross_norm, plain.dropout
        self.feed_forward, self.feed_forward_norm = plain.feed_forward, plain.feed_forward_norm
        own, cross, forward = (cast(Any, part) for part in (self.attention, self.cross_attention, self.feed_forward))
        # Called without a module's bookkeeping, and found without it.
        self.products = (own.joined, own.output, cross.query, cross.output, forward.joined, forward.down)
        self.heads, self.activation = own.heads, forward.activation
        norms = (cast(Any, norm) for norm in (self.attention_norm, self.cross_norm, self.feed_forward_norm))
        self.norms = tuple((norm.normalized_shape, norm.weight, norm.bias, norm.eps) for norm in norms)

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        rotation: Rope | None = None,
        encoder_output: Tensor | None = None,
        cross_mask: Mask | None = None,
        cache: LayerKVCache | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        paths, (rows, tokens, dim) = mask.tree, x.shape
        is_step = paths is not None or (tokens == 1 and isinstance(mask.start, int))
        if cache is None or cache.source is None or not is_step or x.dtype != torch.float32:
            return super().forward(x, mask, rotation, encoder_output, cross_mask, cache, real)
        assert cross_mask is not None
        joined, output, ask, bring, wide, down = self.products
        here = self._enter(x.reshape(rows * tokens, dim))
        found = self._look_back(self._ask(here, 0, joined), cache, None if paths is None else paths.mask, rows)
        here = self._join(here, 0, output, found)
        here = self._join(here, 1, bring, self._look(self._ask(here, 1, ask), cache.source, cross_mask.lengths))
        here = self._join(here, 2, down, self._widen(here, wide))
        return self._leave(here).view(rows, tokens, dim)

    # What stands between the products. `here` is what the residuals have added up to, (B · T, D).

    def _enter(self, flat: Tensor) -> Any:
        return flat

    def _leave(self, here: Any) -> Tensor:
        return here

    def _ask(self, here: Any, sublayer: int, product: Any) -> Any:
        """What a product (to N) makes of it, behind the sublayer's norm if that comes first: (B · T, N)."""
        return product.forward(torch.layer_norm(here, *self.norms[sublayer]) if self.pre else here)

    def _join(self, here: Any, sublayer: int, product: Any, found: Any) -> Any:
        """What the sublayer has found goes through its last product and joins."""
        x = product.forward(found).add_(here)
        return x if self.pre else torch.layer_norm(x, *self.norms[sublayer])

    def _widen(self, here: Any, wide: Any) -> Any:
        return self.activation(self._ask(here, 2, wide))

    def _look_back(self, asked: Any, cache: LayerKVCache, allowed: Tensor | None, rows: int) -> Any:
        """Of queries, keys and values (B · T, 3 · D) the last two join what is held; then as `_look`.

        Each of T queries sees what is `allowed` (B, T, up to S), or, if nothing is said, all.
        """
        q, k, v = asked.view(rows, len(asked) // rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, E)
        keys, values = cache.extend(k, v)
        return self._brought(q, keys, values, self.astray.off(allowed, keys.shape[2]))

    def _look(self, asked: Any, source: tuple[Tensor, Tensor], lengths: Tensor | None) -> Any:
        """What queries (B · T, D) bring home from keys and values (B, H, S, E), their heads joined: (B · T, D)."""
        rows, heads, keys, dim = source[0].shape
        q = asked.view(rows, len(asked) // rows, heads, dim).transpose(1, 2)
        return self._brought(q, *source, self.unseen.of(lengths, keys))

    @staticmethod
    def _brought(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
        look = bf16_attention if keys.dtype == torch.bfloat16 else small_q_attention
        found = look(q, keys, values, hidden).view(q.shape).transpose(1, 2)
        return found.to(q.dtype, memory_format=torch.contiguous_format).reshape(len(q) * q.shape[2], -1)


class Here(NamedTuple):
    """Where a step stands: the sum of the residuals, and what the next product reads of it."""

    flat: Tensor  # (B · T, D)
    read: Tensor | QuantizedRows


class NativeTranslatorDecodeLayer(TranslatorDecodeLayer):
    """The same with native code between the products: each reads what the one before gave once, and leaves it as the
    next one wants it, normed, or in bytes."""

    def __init__(self, plain: Layer, unseen: MaskCache, astray: MaskCache):
        super().__init__(plain, unseen, astray)
        self.small = isinstance(self.products[0], QuantizedLinear)
        self.own_norms = tuple(NormParams(weight.detach(), _detached(bias), eps) for _, weight, bias, eps in self.norms)

    def _enter(self, flat: Tensor) -> Here:
        flat = flat.contiguous()
        norm, raw = self.own_norms[0] if self.pre else None, GemmOutput(flat)
        if self.small:
            return Here(flat, native.quantize(raw, norm=norm))
        if norm is None:
            return Here(flat, flat)
        normed = torch.empty_like(flat)
        native.residual_norm_quantize(raw, norm=norm, normed=normed)
        return Here(flat, normed)

    def _leave(self, here: Here) -> Tensor:
        return here.flat

    def _ask(self, here: Here, sublayer: int, product: Any) -> GemmOutput:
        return product.packed().raw(here.read) if self.small else GemmOutput(product.forward(here.read))

    def _join(self, here: Here, sublayer: int, product: Any, found: Any) -> Here:
        raw = product.packed().raw(found) if self.small else GemmOutput(product.forward(found))
        numbers = raw.numbers
        if self.pre and sublayer == 2:  # the next layer has its own norm
            native.residual_norm_quantize(raw, here.flat, sum=numbers)
            return Here(numbers, numbers)
        small = native.empty_quantized_rows(*numbers.shape) if self.small else None
        if not self.pre:
            normed = torch.empty_like(numbers)
            native.residual_norm_quantize(raw, here.flat, norm=self.own_norms[sublayer], normed=normed, small=small)
            return Here(normed, small or normed)
        norm = self.own_norms[sublayer + 1]
        if small is not None:
            native.residual_norm_quantize(raw, here.flat, norm=norm, sum=numbers, small=small)
            return Here(numbers, small)
        normed = torch.empty_like(numbers)
        native.residual_norm_quantize(raw, here.flat, norm=norm, sum=numbers, normed=normed)
        return Here(numbers, normed)

    def _widen(self, here: Here, wide: Any) -> Tensor | QuantizedRows:
        if not self.small:
            return self.activation(wide.forward(here.read))
        raw, relu = wide.packed().raw(here.read), self.activation is torch.relu_
        return native.quantize(raw if relu else GemmOutput(self.activation(native.dequantize(raw))), relu)

    def _look_back(
        self, asked: GemmOutput, cache: LayerKVCache, allowed: Tensor | None, rows: int
    ) -> Tensor | QuantizedRows:
        assert isinstance(cache.slot_ids, slice)  # all rows are equally long
        cache.grow()
        return self._brought_home(asked, *cache.read(), allowed, None, cache.slot_ids.start)

    def _look(self, asked: GemmOutput, source: tuple[Tensor, Tensor], lengths: Tensor | None) -> Tensor | QuantizedRows:
        return self._brought_home(asked, *source, None, lengths, None)

    def _brought_home(
        self,
        asked: GemmOutput,
        keys: Tensor,
        values: Tensor,
        allowed: Tensor | None,
        lengths: Tensor | None,
        place: int | None,
    ) -> Tensor | QuantizedRows:
        small = native.empty_quantized_rows(len(asked.numbers), keys.shape[1] * keys.shape[3]) if self.small else None
        found = native.attend(asked, keys, values, allowed, lengths, place, small)
        return small or found


def translator_decode_layers(config: ModelConfig, layers: list[Any]) -> list[Layer] | None:
    """These layers of a stack, read lightly, or None where they cannot be."""
    if config.position == "rotary" or not all(_supports(layer) for layer in layers):
        return None
    kind = NativeTranslatorDecodeLayer if _supports_native(config, layers) else TranslatorDecodeLayer
    unseen, astray = MaskCache(), MaskCache()
    return [kind(layer, unseen, astray) for layer in layers]


def _supports_native(config: ModelConfig, layers: list[Any]) -> bool:
    """Whether native code is there and knows these widths, and bytes, where weights are bytes."""
    small = [module for layer in layers for module in layer.modules() if isinstance(module, QuantizedLinear)]
    if small and not (len(small) == len(layers) * PRODUCTS and all(each.bits == 8 for each in small)):
        return False
    widths = (config.dim, config.heads * config.head_dim, config.head_dim, config.ff_dim)
    return native.supports(*widths) and (not small or has_onednn_int8())


def _supports(layer: Layer) -> bool:
    attention, cross, forward = layer.attention, layer.cross_attention, layer.feed_forward
    norms = (layer.attention_norm, layer.cross_norm, layer.feed_forward_norm)
    if not all(
        isinstance(norm, LayerNorm) and norm.weight.dtype == torch.float32 and norm.weight.is_cpu for norm in norms
    ):
        return False
    if not isinstance(attention, FusedAttention) or not isinstance(cross, FusedAttention):
        return False
    full = attention.pattern.kind == "full" and attention.heads == attention.kv_heads
    return full and isinstance(forward, FusedFeedForward) and not forward.is_gated


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
