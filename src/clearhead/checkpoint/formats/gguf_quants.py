"""Read the blocks of llama.cpp's GGUF files, dequantized or as they are.   N blocks · 32 or 256 numbers a block

A block of Q4_0 … Q8_0 has 32 numbers and one scale; a block of Q2_K … Q6_K has 256 numbers, a scale, and quantized
scales of its parts. Low bits of several numbers share a byte; shifting finds the bits of each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class BlockType(NamedTuple):
    """A type of tensor: name, numbers and bytes of a block, and how to read blocks (N, bytes)."""

    name: str
    numbers: int
    bytes: int
    dequantize: Callable[[Array], Array]


def dequantize(raw: Array, kind: int) -> Array:
    """Return the numbers of blocks (N, bytes of a block) of uint8 as fp32 (N, numbers of a block)."""
    return BLOCK_TYPES[kind].dequantize(raw).astype(np.float32).reshape(len(raw), -1)


def quantized(raw: Array, kind: int) -> tuple[Array, Array, Array | None] | None:
    """Return integers, scales and minima of 32 numbers each as QuantizedTensor has them: the same weights, exactly.

    None for types that the kernels have no integers for: of five or six bits, or with scales of 16 numbers.
    """
    if BLOCK_TYPES[kind].name == "Q8_0":
        scale, numbers = _split(raw, 2)
        return numbers.view(np.int8), scale.view(np.float16), None
    if BLOCK_TYPES[kind].name == "Q4_0":
        scale, low = _split(raw, 2)
        scale = scale.view(np.float16)
        with np.errstate(over="ignore"):  # an infinite minimum is refused when the model is loaded
            return _pairs(_bits(low, 1, 0, 4, mask=15)), scale, scale * np.float16(-8)
    if BLOCK_TYPES[kind].name == "Q4_1":
        scale, offset, low = _split(raw, 2, 2)
        return _pairs(_bits(low, 1, 0, 4, mask=15)), scale.view(np.float16), offset.view(np.float16)
    if BLOCK_TYPES[kind].name == "Q4_K":
        scale, offset, packed, low = _split(raw, 2, 2, 12)
        scales, offsets = _six_bit_scales(packed)
        minima = -_fp16(offset) * offsets
        return _pairs(_bits(low, 4, 0, 4, mask=15)), _fp16(scale) * scales, minima
    return None


def _pairs(numbers: Array) -> Array:
    """Put two neighboring numbers of four bits into a byte."""
    return numbers[:, 0::2] | numbers[:, 1::2] << np.uint8(4)


def _split(blocks: Array, *sizes: int) -> list[Array]:
    """Split the bytes of blocks into parts of these sizes and the rest."""
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _fp16(part: Array) -> Array:
    return part.view(np.float16).astype(np.float32)


def _bits(part: Array, groups: int, *shifts: int, mask: int) -> Array:
    """Return `part >> shift & mask` for each shift, for each of the groups of a part: (N, numbers)."""
    shifted = part.reshape(len(part), groups, 1, -1) >> np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    return (shifted & np.uint8(mask)).reshape(len(part), -1)


def _bit_list(part: Array) -> Array:
    """Return the bits of four bytes, lowest first: (N, 32)."""
    return np.unpackbits(part, axis=1, bitorder="little")


def _q4_0(blocks: Array) -> Array:
    scale, low = _split(blocks, 2)
    return _fp16(scale) * (_bits(low, 1, 0, 4, mask=15).astype(np.int8) - 8)


def _q4_1(blocks: Array) -> Array:
    scale, offset, low = _split(blocks, 2, 2)
    return _fp16(scale) * _bits(low, 1, 0, 4, mask=15) + _fp16(offset)


def _q5_0(blocks: Array) -> Array:
    scale, high, low = _split(blocks, 2, 4)
    return _fp16(scale) * ((_bits(low, 1, 0, 4, mask=15) | _bit_list(high) << 4).astype(np.int8) - 16)


def _q5_1(blocks: Array) -> Array:
    scale, offset, high, low = _split(blocks, 2, 2, 4)
    return _fp16(scale) * (_bits(low, 1, 0, 4, mask=15) | _bit_list(high) << 4) + _fp16(offset)


def _q8_0(blocks: Array) -> Array:
    scale, numbers = _split(blocks, 2)
    return _fp16(scale) * numbers.view(np.int8)


def _scaled(numbers: Array, scales: Array, offsets: Array | None = None) -> Array:
    """Multiply the parts of a block by their scales (N, parts) and subtract their offsets."""
    parts = numbers.reshape(*scales.shape, -1) * scales[..., None]
    return parts if offsets is None else parts - offsets[..., None]


def _q2_k(blocks: Array) -> Array:
    scales, low, scale, offset = _split(blocks, 16, 64, 2)
    numbers = _bits(low, 2, 0, 2, 4, 6, mask=3).astype(np.float32)
    return _scaled(numbers, _fp16(scale) * (scales & 15), _fp16(offset) * (scales >> 4))


def _q3_k(blocks: Array) -> Array:
    high, low, scales, scale = _split(blocks, 32, 64, 12)
    numbers = _bits(low, 2, 0, 2, 4, 6, mask=3) | _bits(high, 1, *range(8), mask=1) << 2
    parts = _bits(scales[:, :8], 1, 0, 4, mask=15) | _bits(scales[:, 8:], 1, 0, 2, 4, 6, mask=3) << 4
    return _scaled(numbers.astype(np.float32) - 4, _fp16(scale) * (parts.astype(np.int8) - 32))


def _six_bit_scales(packed: Array) -> tuple[Array, Array]:
    """Return the scales and offsets of eight parts, of six bits each, from twelve bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    offsets = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales, offsets


def _q4_k(blocks: Array) -> Array:
    scale, offset, packed, low = _split(blocks, 2, 2, 12)
    scales, offsets = _six_bit_scales(packed)
    numbers = _bits(low, 4, 0, 4, mask=15).astype(np.float32)
    return _scaled(numbers, _fp16(scale) * scales, _fp16(offset) * offsets)


def _q5_k(blocks: Array) -> Array:
    scale, offset, packed, high, low = _split(blocks, 2, 2, 12, 32)
    scales, offsets = _six_bit_scales(packed)
    numbers = _bits(low, 4, 0, 4, mask=15) | _bits(high, 1, *range(8), mask=1) << 4
    return _scaled(numbers.astype(np.float32), _fp16(scale) * scales, _fp16(offset) * offsets)


def _q6_k(blocks: Array) -> Array:
    low, high, scales, scale = _split(blocks, 128, 64, 16)
    numbers = _bits(low, 2, 0, 4, mask=15) | _bits(high, 2, 0, 2, 4, 6, mask=3) << 4
    return _scaled(numbers.astype(np.float32) - 32, _fp16(scale) * scales.view(np.int8))


def _bf16(blocks: Array) -> Array:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


BLOCK_TYPES = {  # by ggml_type
    0: BlockType("F32", 1, 4, lambda blocks: blocks.view(np.float32)),
    1: BlockType("F16", 1, 2, _fp16),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _bf16),
}
