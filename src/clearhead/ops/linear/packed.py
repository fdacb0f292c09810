"""fp32 and bf16 linear layers with weights in oneDNN's blocked layout, for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.ops.gelu import gelu_tanh
from clearhead.ops.linear.quantized import ROWS


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is here, knows this dtype, and takes weights in its own order."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """x W ᵀ + b with W in oneDNN's own blocks, which saves laying it out anew in every step; and what follows, if it is
    one of `activations`, while the numbers are at hand."""

    activations: ClassVar[dict[Any, tuple[str, str]]] = {  # oneDNN's name and form of each
        None: ("none", ""),
        torch.relu_: ("relu", ""),
        F.gelu: ("gelu", "none"),
        gelu_tanh: ("gelu", "tanh"),
        F.silu: ("swish", ""),
    }

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        # No parameter, which would have to be looked for at every step.
        self.plain_bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        self.activation: Callable[[Tensor], Tensor] | None = None
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        name, form = self.activations[self.activation]
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.plain_bias, name, [], form)
