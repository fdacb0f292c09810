"""Matrices of one or half a byte a number for a CPU, held once, in the order of torch's fastest kernels for few rows.

M rows · K inputs · N outputs

What `QuantisedLinear` computes, for reading alone: that one keeps its weights as they are stored, and can be moved and
saved; these keep only what the kernel wants.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.model.embedding import Embedding
from clearhead.model.quantised import QuantisedLinear, quantise_rows

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
GROUP = 32  # weights of half a byte that share a scale and a lowest value
BLOCK = 64  # outputs that the kernel for half bytes keeps together
MANY = 64  # rows from which on it pays to spread half bytes out to bf16
SMALLEST = 6.1e-5  # a step between two numbers that the kernel does not go below


class ByteLinear(nn.Module):
    """y = x Wᵀ + b with W in 8 bits, a scale for each output; the rows of x are rounded to 8 bits too, each by itself.

    The kernel (FBGEMM) rounds by the range of all that it is given. One row is given as it is. Several are rounded
    here, by the same rule, and one more row beside them makes their range such that nothing is rounded twice.
    """

    edges: Tensor
    sums: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape
        numbers, scale = quantise_rows(linear.weight.detach().float())  # (N, K), (N, 1)
        self.packed, self.bias = _pack(numbers, scale[:, 0]), linear.bias
        self.product = torch.ops.quantized.linear_dynamic.default  # a look-up costs
        self.register_buffer("sums", numbers.sum(dim=1) * scale[:, 0])  # (N,) what 1 everywhere would give
        edges = torch.zeros(1, self.inputs)
        edges[0, 0], edges[0, -1] = -128, 127
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        if x.numel() == self.inputs:
            out = self.product(x.float(), self.packed, False)
        else:
            rows = x.reshape(-1, self.inputs).float()
            numbers, scale, zero = _rounded(rows)  # (M, K) from -128 to 127, (M, 1), (M, 1)
            out = self.product(torch.cat([numbers, self.edges]), self.packed, False)[:-1]
            out = out.addcmul_(zero, self.sums, value=-1).mul_(scale).reshape(*x.shape[:-1], self.outputs)
        return (out if self.bias is None else out.add_(self.bias)).to(x.dtype)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows (M, K) as whole numbers from -128 to 127 with scale and zero (M, 1): x ≈ (number - zero) · scale."""
    lowest, highest = rows.amin(dim=1, keepdim=True).clamp_(max=0), rows.amax(dim=1, keepdim=True).clamp_(min=0)
    step = (highest.double() - lowest.double()) / 255
    step = torch.where(step.float() == 0, 0.1, step)
    zero = (-lowest / step).round().clamp(0, 255).float() - 128
    scale = step.clamp(min=SMALLEST).float()
    return (rows * (1 / scale)).round_().add_(zero).clamp_(-128, 127), scale, zero


def _pack(numbers: Tensor, scale: Tensor) -> Any:
    """The kernel's own object, which holds the weights in its order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop quantised tensors; without them `has_bytes` is False
        zeros = torch.zeros(len(scale), dtype=torch.long)
        weight = torch._make_per_channel_quantized_tensor(numbers.contiguous(), scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)


class HalfByteLinear(nn.Module):
    """y = x Wᵀ + b with W in 4 bits, a scale and a lowest value for each group; the product is in bf16.

    Few rows go through a kernel that spreads numbers out as it reads them; for many it is done once, for all of them.
    """

    packed: Tensor
    both: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        small = QuantisedLinear(linear, bits=4, group=GROUP)
        assert small.lowest is not None
        self.outputs, self.inputs = linear.weight.shape
        values = torch.stack([small.weight & 15, small.weight >> 4], dim=-1).flatten(1)  # (N, K), 0 to 15
        both = torch.stack([small.scale, small.lowest + 8 * small.scale], dim=-1).transpose(0, 1)
        self.register_buffer("packed", torch._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 1))
        self.register_buffer("both", both.to(torch.bfloat16).contiguous())  # (K/group, N, 2): scale, and middle
        self.bias = linear.bias
        self.can_spread = self.outputs % BLOCK == 0 and _has_blocks()

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        rows = x.reshape(-1, self.inputs).to(torch.bfloat16)
        if len(rows) < MANY or not self.can_spread:
            out = torch._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.both)
        else:
            out = torch.matmul(rows, self.spread()).transpose(0, 1)
        out = out.to(x.dtype).reshape(*x.shape[:-1], self.outputs)
        return out if self.bias is None else out.add_(self.bias)

    def spread(self) -> Tensor:
        """The weights in bf16, (N/64, K, 64): the kernel's order, of which every block is a matrix."""
        bytes = self.packed.view(-1, self.inputs, BLOCK // 2)
        values = torch.cat([bytes & 15, bytes >> 4], dim=2).view(torch.int8).sub_(8).to(torch.bfloat16)
        groups = values.view(len(bytes), -1, GROUP, BLOCK)
        scale, middle = self.both.view(-1, len(bytes), BLOCK, 2).permute(3, 1, 0, 2)[:, :, :, None].contiguous()
        return torch.addcmul(middle, groups, scale).view(len(bytes), self.inputs, BLOCK)


@cache
def _has_blocks() -> bool:
    """Whether the kernel keeps 64 outputs together, two in a byte, as it does with AVX-512."""
    values = torch.arange(2 * BLOCK * GROUP, dtype=torch.int32).view(2 * BLOCK, GROUP) * 7 % 16
    bytes = torch._convert_weight_to_int4pack_for_cpu(values, 1).reshape(-1, GROUP, BLOCK // 2)
    return torch.equal(torch.cat([bytes & 15, bytes >> 4], dim=2).transpose(1, 2).reshape(2 * BLOCK, GROUP), values)


class ByteEmbedding(nn.Module):
    """A table of 8-bit rows, a scale for each."""

    weight: Tensor
    scale: Tensor

    def __init__(self, table: nn.Embedding):
        super().__init__()
        self.num_embeddings = table.num_embeddings
        numbers, scale = quantise_rows(table.weight.detach().float())
        self.register_buffer("weight", numbers)
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (…) to (…, D)."""
        return F.embedding(ids, self.weight) * F.embedding(ids, self.scale)


@cache
def has_bytes() -> bool:
    """Whether the kernel is here and exact: without VNNI it adds pairs in 16 bits, which overflow."""
    if "fbgemm" not in torch.backends.quantized.supported_engines or not hasattr(torch.ops.quantized, "linear_dynamic"):
        return False
    try:
        packed = _pack(torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16))
        most = torch.full((1, 64), 255.0)
        most[0, 0] = 0
        return bool((torch.ops.quantized.linear_dynamic(most, packed, False) == 127 * 255 * 63).all())
    except (RuntimeError, AttributeError):
        return False


def bits_of(linear: nn.Linear, four: bool) -> int:
    """4 where that is wanted and groups fit into the rows, else 8."""
    return 4 if four and linear.in_features % GROUP == 0 and linear.out_features % 16 == 0 else 8


def smaller(linear: nn.Linear, four: bool) -> nn.Module:
    """A linear layer in small form; with `four` in 4 bits, but for the words' scores, of which all is read off."""
    words = linear.out_features > 8 * linear.in_features
    return HalfByteLinear(linear) if bits_of(linear, four and not words) == 4 else ByteLinear(linear)


def shrink_rest(network: nn.Module) -> None:
    """Token embeddings in small form, and copies of what else there is: none of it holds a file's mapping open."""
    for module in network.modules():
        if isinstance(module, Embedding):
            module.tokens = ByteEmbedding(module.tokens)  # type: ignore[assignment]
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))


def is_small(network: nn.Module) -> bool:
    """Whether the weights are in small form, which cannot be undone."""
    return any(isinstance(module, ByteLinear | HalfByteLinear) for module in network.modules())
