"""The paged attention kernels equal attention in fp64 on a GPU: `make test-gpu`."""

import pytest
import torch

from clearhead.ops.triton import paged_attention as kernels
from tests.gpu.paged_attention_cases import Shape, check_chunks, check_cross, check_decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [
    ((2, 4, 64), [70, 0]),
    ((1, 3, 32), [33, 1, 129]),
    ((8, 4, 64), [600]),  # split
    ((8, 4, 64), [4000]),
    ((8, 4, 32), [row * 37 % 300 for row in range(40)]),  # not split
    ((3, 3, 128), [200, 17]),
    ((1, 16, 256), [130]),
    ((12, 1, 64), [64, 63, 65, 0, 1]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("span", [16, 1])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("heads", "lengths"), LENGTHS)
def test_decode_attention_equals_the_reference(
    heads: tuple[int, int, int], lengths: list[int], rotated: bool, span: int, dtype: torch.dtype
) -> None:
    check_decode(Shape(*heads, dtype, rotated, span), lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "lengths"), LENGTHS)
def test_cross_attention_equals_the_reference(
    heads: tuple[int, int, int], lengths: list[int], dtype: torch.dtype
) -> None:
    check_cross(Shape(*heads, dtype), [max(1, length) for length in lengths])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("span", [16, 1])
@pytest.mark.parametrize(
    ("heads", "cached", "counts"),
    [
        ((2, 4, 32), [0, 5, 40], [20, 1, 3]),
        ((8, 4, 64), [0, 100, 0, 17], [130, 70, 1, 5]),
        ((1, 16, 128), [3], [40]),
        ((4, 1, 64), [0, 0], [100, 65]),
        ((2, 3, 256), [0], [30]),
    ],
)
def test_chunk_attention_equals_the_reference(
    heads: tuple[int, int, int], cached: list[int], counts: list[int], span: int, causal: bool, dtype: torch.dtype
) -> None:
    check_chunks(Shape(*heads, dtype, True, span), cached, counts, causal)


@pytest.mark.parametrize("splits", [1, 2, 8, 32])
def test_any_number_of_splits_equals_the_reference(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    monkeypatch.setattr(kernels, "_splits", lambda *shape: splits)
    for length in (1, 31, 32, 33, 1000):
        check_decode(Shape(4, 4, 64, torch.bfloat16), [length, 1000 - length])


def test_unsupported_shapes_and_dtypes_are_refused() -> None:
    supports = kernels.paged_attention_supports
    assert supports(64, 4, torch.bfloat16) is None
    assert "head_dim 48" in str(supports(48, 4, torch.bfloat16))
    assert "17 heads" in str(supports(64, 17, torch.bfloat16))
    assert "float64" in str(supports(64, 4, torch.float64))
