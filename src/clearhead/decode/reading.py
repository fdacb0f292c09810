"""A network for reading alone: fewer and larger matrix products, weights laid out as the kernels want them, or int8.

Put on from outside: the copy shares whatever it does not lay out anew with the network it came from, which stays as it
is. It can be used wherever the network can, as long as nothing is trained or saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.model import Network
from clearhead.model.attention import Attention, Rotation
from clearhead.model.feedforward import FeedForward
from clearhead.model.positions import rotate
from clearhead.model.quantised import ROWS, QuantisedLinear

HALF = (torch.bfloat16, torch.float16)
AnyNetwork = TypeVar("AnyNetwork", bound=Network)


@torch.inference_mode(False)
@torch.no_grad()
def for_reading(network: AnyNetwork, dtype: torch.dtype | None = None) -> AnyNetwork:
    """A fast copy of the network that only reads, in this dtype; torch.int8 is int8 weights and activations.

    Without a dtype it is the network's own but, on a CPU, float32 in the place of halves, which many CPUs compute
    slowly. On other devices the network stays as it is, but for int8.
    """
    own = next(network.parameters())
    on_cpu, small = own.device.type == "cpu", dtype == torch.int8
    if not on_cpu and not small:
        return network
    if dtype is None or small:
        dtype = torch.float32 if on_cpu and own.dtype in HALF else own.dtype
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    twin = copy.deepcopy(network, shared)
    if small:
        _replace(twin, QuantisedLinear)
    elif _can_pack(dtype):
        _replace(twin, partial(PackedLinear, dtype=dtype))
    else:
        _replace(twin, lambda linear: linear)
    _turn(twin, dtype)
    return twin


def _replace(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Below `module`, join what reads the same input, and make something else of every linear layer."""
    for name, child in list(module.named_children()):
        if isinstance(child, Attention) and type(child.query) is nn.Linear:
            child = FusedAttention(child)
        elif isinstance(child, FeedForward) and type(child.up) is nn.Linear:
            child = FusedFeedForward(child)
        elif isinstance(child, nn.Dropout):
            child = nn.Identity()
        if type(child) is nn.Linear:
            child = make(child)
        else:
            _replace(child, make)
        setattr(module, name, child)


def _turn(network: nn.Module, dtype: torch.dtype) -> None:
    """All other weights in this dtype; those of another become copies, since the network they came from has them."""
    turned: dict[int, Tensor] = {}
    for module in network.modules():
        if isinstance(module, QuantisedLinear):
            continue
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.dtype == dtype or not tensor.is_floating_point():
                continue
            if id(tensor) not in turned:
                new = tensor.detach().to(dtype)
                turned[id(tensor)] = nn.Parameter(new, False) if isinstance(tensor, nn.Parameter) else new
            setattr(module, name, turned[id(tensor)])


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is here, knows this dtype, and takes weights in its own order."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """x W ᵀ + b with W in oneDNN's own blocks, which saves laying it out anew in every step."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class FusedAttention(Attention):
    """Attention with one product for queries, keys and values, in cross-attention one for keys and values."""

    def __init__(self, plain: Attention):
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.pattern = plain.heads, plain.kv_heads, plain.pattern
        self.is_cross, self.dropout, self.training = plain.is_cross, plain.dropout, plain.training
        if self.is_cross:
            self.query, self.joined = plain.query, _joined(plain.key, plain.value)
        else:
            self.joined = _joined(plain.query, plain.key, plain.value)
        self.output = plain.output

    def projections(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, E), keys and values (B, G, T, E) of the same tokens."""
        heads = self.joined(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))  # (B, T, H + 2G, E)
        if rotation is not None:
            turning, still = heads.tensor_split((self.heads + self.kv_heads,), dim=2)
            heads = torch.cat([rotate(turning, rotation), still], dim=2)
        q, k, v = heads.transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v

    def queries(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """(B, T, D) to (B, H, T, E)."""
        return super().queries(x) if self.is_cross else self.projections(x, rotation)[0]

    def keys_and_values(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """(B, S, D) to (B, G, S, E) twice."""
        if not self.is_cross:
            return self.projections(x, rotation)[1:]
        k, v = self.joined(x).unflatten(-1, (2 * self.kv_heads, -1)).transpose(1, 2).chunk(2, dim=1)
        return k, v


class FusedFeedForward(FeedForward):
    """The feed-forward with one product for the gate and its partner, and relu in place."""

    def __init__(self, plain: FeedForward):
        nn.Module.__init__(self)
        self.activation = torch.relu_ if plain.activation is F.relu else plain.activation
        self.is_gated, self.training = plain.gate is not None, plain.training
        self.joined = plain.up if plain.gate is None else _joined(plain.gate, plain.up)
        self.down = plain.down

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        hidden = self.joined(x)
        if self.is_gated:
            gate, up = hidden.chunk(2, dim=-1)
            return self.down(self.activation(gate) * up)
        return self.down(self.activation(hidden))


def _joined(*layers: nn.Linear) -> nn.Linear:
    """Layers that read the same input as one, the outputs side by side."""
    first = layers[0]
    outputs = sum(layer.out_features for layer in layers)
    joined = nn.Linear(first.in_features, outputs, bias=False, device="meta")
    joined.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), False)
    return joined
