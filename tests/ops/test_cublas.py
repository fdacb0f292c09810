"""GELU inside products, done by torch where there is no cuBLAS: outputs, gradients, what a compiler is told."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops import cublas
from clearhead.ops.triton.backward_kernels import MatmulGelu


def some(rows: int = 5) -> list[Tensor]:
    """x (R, D), up (F, D), its bias (F,), down (D, F)."""
    torch.manual_seed(0)
    return [torch.randn(size, dtype=torch.float64) for size in ((rows, 8), (16, 8), (16,), (8, 16))]


def test_gelu_between_products_has_the_gradients_of_the_formula() -> None:
    leaves = [leaf.requires_grad_() for leaf in some()]
    x, up, bias, down = leaves
    ours: Tensor = MatmulGelu.apply(*leaves)  # type: ignore[no-untyped-call]
    theirs = F.gelu(F.linear(x, up, bias), approximate="tanh") @ down.T
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    aim = torch.randn_like(theirs)
    for a, b in zip(*(torch.autograd.grad((out * aim).sum(), leaves) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # that of the bias is added up in fp32


def test_a_compiler_is_told_what_comes_out() -> None:
    x, up, bias, down = some()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(cublas.gelu_of_product, (x, up, bias), test_utils=checks)
    torch.library.opcheck(cublas.product_times_slope, (x, down, x.new_ones(5, 16)), test_utils=checks)


def test_only_narrow_numbers_in_even_sizes_on_a_gpu_go_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "_library", lambda: object())  # as if there were one
    assert cublas.works(torch.bfloat16, 64, 256)
    assert not cublas.works(torch.float32, 64, 256)
    assert not cublas.works(torch.bfloat16, 63, 256)
    assert cublas._plan(torch.ones(2, 64, dtype=torch.bfloat16), 256, True, cublas.GELU_AUX_BIAS) is None  # on a CPU
    monkeypatch.setattr(cublas, "_library", lambda: None)
    assert not cublas.works(torch.bfloat16, 64, 256)


def test_what_lies_otherwise_is_laid_out_for_cublas() -> None:
    whole = torch.randn(64, 64)
    for part in (whole.T, whole.view(-1)[3:67], whole[:, :8]):
        even = cublas._even(part)
        assert even.is_contiguous()
        assert even.data_ptr() % 64 == 0  # a CPU aligns less
        assert torch.equal(even, part)
