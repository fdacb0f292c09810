"""Row linear layers equal the reference in fp64 on a GPU: `make test-gpu`."""

from typing import Any

import pytest
import torch

from clearhead.ops.triton.linear import gate, rms_norm
from tests.gpu.linear_cases import check_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (3072, 2048, {"normed": True}),
    (8192, 2048, {"normed": True, "gated": True, "activation": "silu"}),
    (2048, 8192, {"added": True}),
    (100, 320, {"biased": True, "activation": "gelu_tanh", "added": True}),
    (333, 576, {"biased": True, "gated": True, "activation": "gelu", "normed": True}),
    (50, 2048, {"activation": "relu", "normed": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("outputs", "inputs", "options"), CASES)
def test_row_linear_equals_the_reference(
    outputs: int, inputs: int, options: dict[str, Any], rows: int, bits: int, dtype: torch.dtype
) -> None:
    check_linear(rows, outputs, inputs, dtype, bits, **options)


@pytest.mark.parametrize("features", [96, 2048, 5000])
def test_norm_and_gate_equal_torch(features: int) -> None:
    x, weight = torch.randn(7, 2 * features, device="cuda"), torch.randn(2 * features, device="cuda")
    expected = torch.nn.functional.rms_norm(x, x.shape[1:], weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, rtol=1e-4, atol=1e-5)
    first, second = x.chunk(2, dim=1)
    torch.testing.assert_close(gate(x, "silu"), torch.nn.functional.silu(first) * second, rtol=1e-4, atol=1e-5)
