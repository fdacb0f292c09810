"""Keys and values of a tree in bf16, where weights are bytes: half as much to read at every step.

B rows · H heads · K branches · C slots · S keys · E head width

Beside bytes, this rounding is lost. oneDNN multiplies many small matrices fast if they lie one behind the other; slots
that nothing is in yet lie between them and are read too, so there are few, and what is read there is hidden.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.inference.translator_decode_layer import TranslatorDecodeLayer
from clearhead.model.cache import LayerKVCache
from clearhead.ops.attention.sdpa import MANY_HEADS
from clearhead.ops.linear.quantized import QuantizedLinear

BLOCK = 32  # slots that come at once


class BF16KVCache(LayerKVCache):
    """A layer's share of a cache, which goes over into this one."""

    @classmethod
    def of(cls, whole: LayerKVCache) -> BF16KVCache:
        """The same in bf16."""
        assert whole.source is not None
        keys, values, *source = (x.to(torch.bfloat16) for x in (*whole.read(), *whole.source))
        return cls(keys, values, source=(source[0], source[1]))

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put this step's k and v (B, H, K, E) in place; all keys and values (B, H, C, E), those to come as well."""
        self.grow()
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self.slot_ids], self.values[:, :, self.slot_ids] = k, v
        return self.keys, self.values

    def grow(self) -> None:
        """Let there be slots for what this step brings, and few others."""
        assert self.keys is not None
        assert self.values is not None
        if (held := self.keys.shape[2]) < self.visible_slots:
            more = -(-5 * self.visible_slots // (4 * BLOCK)) * BLOCK - held  # a quarter ahead
            self.keys, self.values = (F.pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))


def can_use_bf16_cache(network: nn.Module, rows: int) -> bool:
    """Whether a tree of so many rows of this network is faster so: with bytes, and enough heads, on a CPU with bf16."""
    layers = [module for module in network.modules() if isinstance(module, TranslatorDecodeLayer)]
    if not layers or rows * layers[0].heads < MANY_HEADS or not _has_halves():
        return False
    return all(isinstance(layer.attention.output, QuantizedLinear) for layer in layers)


@cache
def _has_halves() -> bool:
    """Whether this CPU multiplies bf16 itself, and oneDNN is here to let it."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
    return torch.backends.mkldnn.is_available() and supported()
