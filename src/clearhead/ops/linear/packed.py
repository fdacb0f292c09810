"""fp32 and bf16 linear layers with weights in oneDNN's blocked layout, for the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.ops.gelu import gelu_tanh
from clearhead.ops.linear.quantized import TYPICAL_ROWS

log = logging.getLogger("clearhead")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN can prepack linear weights of this dtype here."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        log.info("linear weights are not packed: this torch has no oneDNN prepacking")
        return False
    if dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return True
    log.info("linear weights are not packed: oneDNN does not support %s on this CPU", dtype)
    return False


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W prepacked for oneDNN, which saves a reorder per call, and an optional fused activation."""

    activations: ClassVar[dict[Any, tuple[str, str]]] = {  # function: oneDNN's name and variant
        None: ("none", ""),
        torch.relu_: ("relu", ""),
        F.gelu: ("gelu", "none"),
        gelu_tanh: ("gelu", "tanh"),
        F.silu: ("swish", ""),
    }

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        # A plain attribute: looking up a parameter costs time in every step.
        self.plain_bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        self.activation: Callable[[Tensor], Tensor] | None = None
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), TYPICAL_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        name, variant = self.activations[self.activation]
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.plain_bias, name, [], variant)
