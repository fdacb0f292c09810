"""Dequantized GGUF blocks are those of the gguf library, bit by bit, for random bytes."""

import numpy as np
import pytest

from clearhead.checkpoint.formats.gguf_quants import BLOCK_TYPES, dequantize

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
from gguf import quants  # noqa: E402 (after the skip)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: BLOCK_TYPES[kind].name)
def test_random_blocks_give_the_numbers_of_the_gguf_library(kind: int) -> None:
    block = BLOCK_TYPES[kind]
    theirs = gguf.GGMLQuantizationType(kind)
    assert (block.name, (block.numbers, block.bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])
    raw = np.random.default_rng(kind).integers(0, 256, (500, block.bytes), np.uint8)
    with np.errstate(all="ignore"):  # random scales are infinite or not a number now and then
        ours, expected = dequantize(raw, kind), quants.dequantize(raw, theirs).astype(np.float32)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, expected)
