"""GPTQ and AWQ weights in safetensors: int4 in groups of inputs.   N outputs · K inputs · G groups

Eight integers share an int32: of GPTQ's `qweight` (K/8, N) neighboring inputs, of AWQ's (K, N/8) and of both `qzeros`
(G, N/8) neighboring outputs. A weight is (integer - zero) · scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.errors import UserError
from clearhead.ops.linear.packed_weight import GROUP
from clearhead.ops.linear.quantized_tensor import QuantizedTensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of the integers of a word, lowest bits first
IN_ORDER = tuple(range(8))
PARTS = ("qweight", "qzeros", "scales")


def check_method(fields: Fields, where: object) -> str:
    """Return gptq or awq; other methods and numbers of bits are refused."""
    method, bits = str(fields.data.get("quant_method", "quantization_config")), fields.data.get("bits")
    layout = str(fields.data.get("version") or "gemm").lower()  # AWQ's; gemv is another one
    if method not in ("gptq", "awq") or bits != 4 or layout != "gemm":
        raise UserError(
            f"{where}: the weights are quantized ({method:.20}) other than by GPTQ or AWQ in 4 bits; "
            "import the model they were made from, or a GGUF file of it"
        )
    return method


def unpack(tensors: Mapping[str, Tensor], fields: Fields, where: object) -> dict[str, Tensor]:
    """Return the tensors with `weight` instead of its packed parts; all others become fp32."""
    method = check_method(fields, where)
    # Files of version 1 store zeros less one, as the first kernels added it.
    offset = int(method == "gptq" and fields.data.get("checkpoint_format", "gptq") == "gptq")
    unpacked = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    for module in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        groups = unpacked.pop(f"{module}.g_idx", None)
        try:
            words, zeros, scales = (unpacked.pop(f"{module}.{part}") for part in PARTS)
            unpacked[f"{module}.weight"] = _weight(method, offset, groups, words, zeros, scales)
        except (KeyError, ValueError, RuntimeError, IndexError):
            raise UserError(f"{where}: {module}.qweight does not fit its scales and zeros") from None
        if unpacked.get(f"{module}.bias") is not None and not unpacked[f"{module}.bias"].any():
            unpacked.pop(f"{module}.bias")  # GPTQ stores one of zeros for layers without bias
    return unpacked


def _weight(method: str, offset: int, groups: Tensor | None, words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """Return a weight (N, K): in int4 if its groups are whole multiples of the kernels', else in fp32."""
    if method == "gptq":
        values = _integers(words.t(), IN_ORDER)  # (N, K)
        points = (_integers(zeros, IN_ORDER) + offset) & 15  # (G, N)
    else:
        values = _integers(words, AWQ_ORDER).t()
        points = _integers(zeros, AWQ_ORDER)
    (outputs, inputs), count = values.shape, len(scales)
    if points.shape != scales.shape or scales.shape != (count, outputs) or inputs % count:
        raise ValueError("shapes")
    scales, minima = scales.t().float(), -(points * scales.float()).t()  # (N, G)
    size, in_order = inputs // count, torch.arange(inputs) // (inputs // count)
    if size % GROUP or (groups is not None and not groups.equal(in_order.to(groups.dtype))):
        index = in_order if groups is None else groups.long()  # GPTQ may quantize inputs in another order
        return values * scales[:, index] + minima[:, index]
    repeats = size // GROUP
    values = values.to(torch.uint8)
    packed = values[:, 0::2] | values[:, 1::2] << 4
    return QuantizedTensor(packed, *(part.repeat_interleave(repeats, dim=1) for part in (scales, minima)))


def _integers(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Unpack int32 words (M, L) to integers (M, 8 · L)."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ValueError("words")
    parts = [words >> 4 * order.index(position) & 15 for position in range(8)]
    return torch.stack(parts, dim=2).flatten(1)
