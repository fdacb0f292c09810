"""A network for reading alone, on a CPU in float32: its weights laid out once as the matrix kernels want them.

Put on from outside: the copy shares everything but the linear layers with the network it came from, gives the same
numbers but for rounding, and can be used wherever the network can, as long as nothing is trained or saved.
"""

from __future__ import annotations

import copy
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from clearhead.model import Network

ROWS = 32  # of a typical step, for which the layout is chosen; others work as well
AnyNetwork = TypeVar("AnyNetwork", bound=Network)


class PackedLinear(nn.Module):
    """x W ᵀ + b with W in oneDNN's own blocks, which saves laying it out anew in every step."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def packed(network: AnyNetwork) -> AnyNetwork:
    """The network with packed linear layers; where its device, its dtype or this machine has no use for it, itself."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return network
    if not any(_can_be_packed(module) for module in network.modules()):
        return network
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    twin = copy.deepcopy(network, shared)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if _can_be_packed(child):
                setattr(module, name, PackedLinear(child))
    return twin


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32
