"""A bf16 KV cache for beam search with int8 weights on the CPU: half the memory traffic of fp32 at every step.

B batch · H heads · K beams · C slots · E head dim

bf16 rounding is negligible next to int8 error. oneDNN is fast on many small matmuls if their matrices are contiguous,
so attention reads allocated slots that are still empty (and masked) too; that is why few are allocated ahead.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.inference.translator_decode_layer import TranslatorDecodeLayer
from clearhead.model.cache import LayerKVCache
from clearhead.ops.attention.sdpa import MIN_BATCH_HEADS
from clearhead.ops.linear.quantized import QuantizedLinear

SLOT_BLOCK = 32  # slots are allocated in multiples of this


class BF16KVCache(LayerKVCache):
    """The cache of one layer in bf16."""

    @classmethod
    def from_fp32(cls, layer: LayerKVCache) -> BF16KVCache:
        """Convert the cache of one layer."""
        assert layer.source is not None
        keys, values, *source = (x.to(torch.bfloat16) for x in (*layer.read(), *layer.source))
        return cls(keys, values, source=(source[0], source[1]))

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store this step's k and v (B, H, K, E); return all slots (B, H, C, E), empty ones included."""
        self.grow()
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self.slot_ids], self.values[:, :, self.slot_ids] = k, v
        return self.keys, self.values

    def grow(self) -> None:
        """Allocate slots for this step and a quarter more, if needed."""
        assert self.keys is not None
        assert self.values is not None
        if (slots := self.keys.shape[2]) < self.visible_slots:
            more = -(-5 * self.visible_slots // (4 * SLOT_BLOCK)) * SLOT_BLOCK - slots
            self.keys, self.values = (F.pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))


def can_use_bf16_cache(network: nn.Module, rows: int) -> bool:
    """Return whether bf16 is faster for beams of `rows` rows: int8 weights, enough heads, a CPU with bf16."""
    layers = [module for module in network.modules() if isinstance(module, TranslatorDecodeLayer)]
    if not layers or rows * layers[0].heads < MIN_BATCH_HEADS or not _has_bf16():
        return False
    return all(isinstance(layer.attention.output, QuantizedLinear) for layer in layers)


@cache
def _has_bf16() -> bool:
    """Return whether this CPU has bf16 instructions and torch has oneDNN to use them."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
    return torch.backends.mkldnn.is_available() and supported()
