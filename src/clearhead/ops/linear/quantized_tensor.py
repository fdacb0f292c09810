"""A weight that stays quantized in memory, in groups of 32 inputs as the native kernels read them.

N outputs · K inputs · G groups of 32 inputs

To all other code it is an fp32 tensor (N, K): every op but those below computes with the dequantized values. So a
network with such weights works everywhere, and the native step takes the stored integers as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from clearhead.ops.linear.packed_weight import GROUP, Arena, PackedWeight, pack_integers, pack_weight
from clearhead.ops.native.structs import LANES

aten = torch.ops.aten


class QuantizedTensor(Tensor):
    """int8: values · scale; int4: values · scale + minimum. Scales are in fp16 or fp32, which the kernels round."""

    integers: Tensor  # (N, K) int8, or (N, K/2) uint8 with two values from 0 to 15 per byte, the first in the low bits
    scales: Tensor  # (N, G)
    minima: Tensor | None  # (N, G) of int4

    @staticmethod
    def __new__(cls, integers: Tensor, scales: Tensor, minima: Tensor | None = None) -> QuantizedTensor:
        """Wrap the parts; they are not copied."""
        shape = (len(integers), integers.shape[1] * (1 if minima is None else 2))
        assert shape == (len(scales), scales.shape[1] * GROUP), f"{shape} integers, {tuple(scales.shape)} scales"
        assert minima is None or minima.shape == scales.shape, "a minimum for each scale"
        tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=integers.device)
        tensor.integers, tensor.scales, tensor.minima = integers, scales, minima
        return tensor

    @property
    def kind(self) -> str:
        """int8 or int4."""
        return "int8" if self.minima is None else "int4"

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that make it up, by the suffix of their names in files."""
        parts = {"": self.integers, ".scale": self.scales}
        return parts if self.minima is None else parts | {".minimum": self.minima}

    def rows(self, index: Any) -> QuantizedTensor:
        """Return some rows: `index` is a slice or a tensor of numbers."""
        minima = None if self.minima is None else self.minima[index]
        return QuantizedTensor(self.integers[index], self.scales[index], minima)

    def numbers(self) -> Tensor:
        """The integers (N, K): from -127 to 127, or from 0 to 15."""
        if self.minima is None:
            return self.integers
        return torch.stack([self.integers & 15, self.integers >> 4], dim=-1).flatten(1)

    def dequantized(self) -> Tensor:
        """The weight in fp32 (N, K)."""
        groups = self.numbers().float().unflatten(1, (-1, GROUP)) * self.scales.float()[..., None]
        return (groups if self.minima is None else groups + self.minima.float()[..., None]).flatten(1)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"QuantizedTensor({' × '.join(map(str, self.shape))}, {self.kind})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op on the parts if it only moves rows, else on the dequantized values."""
        if (by_parts := BY_PARTS.get(op)) is not None:
            result = by_parts(*args, **(kwargs or {}))
            if result is not None:
                return result
        plain = pytree.tree_map_only(QuantizedTensor, lambda tensor: tensor.dequantized(), (args, kwargs or {}))
        return op(*plain[0], **plain[1])


def _same(tensor: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(tensor.integers, tensor.scales, tensor.minima)


def _clone(tensor: QuantizedTensor, memory_format: Any = None) -> QuantizedTensor:
    return QuantizedTensor(*(part.clone() for part in tensor.parts.values()))


def _slice(
    tensor: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor | None:
    return tensor.rows(slice(start, end, step)) if dim == 0 else None


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> QuantizedTensor | None:
    """Stack rows of one kind."""
    quantized = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    if dim != 0 or len(quantized) < len(tensors) or len({tensor.kind for tensor in quantized}) > 1:
        return None
    columns = zip(*(tensor.parts.values() for tensor in quantized), strict=True)
    return QuantizedTensor(*(torch.cat(parts) for parts in columns))


def _embedding(weight: Tensor, ids: Tensor, *_: Any) -> Tensor | None:
    """Look up rows, dequantizing only those."""
    if not isinstance(weight, QuantizedTensor):
        return None
    return weight.rows(ids.flatten()).dequantized().unflatten(0, ids.shape)


BY_PARTS: dict[Any, Callable[..., Tensor | None]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _clone,
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.embedding.default: _embedding,
}


def pack_stored(
    weight: Tensor, bias: Tensor | None, kind: str, arena: Arena | None = None, any_kind: bool = True
) -> PackedWeight:
    """Pack a weight for the native kernels in a kind; a quantized one of that kind, or any, with its own integers."""
    if not isinstance(weight, QuantizedTensor) or not (any_kind or weight.kind == kind):
        return pack_weight(weight, bias, kind, arena)
    outputs, inputs = weight.shape
    padded = -outputs % LANES
    values = F.pad(weight.numbers(), (0, 0, 0, padded)).unflatten(0, (-1, LANES))  # (P, 16, K)
    scales = weight.scales if weight.minima is None else torch.stack([weight.scales, weight.minima])
    scales = F.pad(scales.half(), (0, 0, 0, padded)).unflatten(-2, (-1, LANES))  # (P, 16, G), or (2, P, 16, G)
    packed, scales = pack_integers(values, scales, weight.kind)
    place = (arena or Arena()).place
    padded_bias = None if bias is None else F.pad(bias.detach().float(), (0, padded))
    return PackedWeight(weight.kind, outputs, inputs, place(packed), place(scales), 1.0, padded_bias)


def has_quantized(network: nn.Module) -> bool:
    """Whether some weight of a network is quantized in memory."""
    return quantized_kind(network) is not None


def quantized_kind(network: nn.Module) -> str | None:
    """Return int8 or int4, whichever most weights of a network have, or None if none is quantized."""
    counts: Counter[str] = Counter()
    for parameter in network.parameters():
        if isinstance(parameter, QuantizedTensor):
            counts[parameter.kind] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else None


def dequantize_network(network: nn.Module) -> None:
    """Replace quantized weights by fp32, in place; tied ones stay tied."""
    plain: dict[int, nn.Parameter] = {}
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, QuantizedTensor):
                if id(parameter) not in plain:
                    plain[id(parameter)] = nn.Parameter(parameter.dequantized(), requires_grad=False)
                setattr(module, name, plain[id(parameter)])
