"""Native code between the products of a step equals the formulas, and is there where it could be compiled."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clearhead.ops.attention.reference import attention
from clearhead.ops.linear.quantized import quantize_rows
from clearhead.ops.native import library as native
from clearhead.ops.native.library import GemmOutput, NormParams, QuantizedRows

compiled = pytest.mark.skipif(native.library() is None, reason="native.c was not compiled here")
WIDTHS = st.sampled_from([32, 64, 96, 160])


def test_it_is_compiled_where_a_compiler_is() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64" or shutil.which("gcc") is None:
        pytest.skip("nothing to compile it with, or another machine")
    if os.environ.get("CLEARHEAD_NATIVE") == "0" or "gcc" not in str(sysconfig.get_config_var("CC")):
        pytest.skip("turned off, or Python is compiled with something else")
    version = subprocess.run(["gcc", "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if int(version.split(".")[0]) < 12:
        pytest.skip(f"GCC {version.strip()} is too old")
    assert native.library() is not None


def test_it_can_be_turned_off() -> None:
    code = "from clearhead.model import native; print(native.library(), native.fits(64))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CLEARHEAD_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["None", "False"]


def test_odd_widths_do_not_fit() -> None:
    assert not native.supports(64, 48)
    assert native.supports(64, 32) == (native.library() is not None)


def formula(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """In float64, of queries (B · T, H · E), the heads joined: (B · T, H · E)."""
    rows, heads, _, dim = k.shape
    q = q.view(rows, -1, heads, dim).transpose(1, 2)
    found = attention(q.double(), k.double(), v.double(), allowed[:, None])[0]
    return found.transpose(1, 2).flatten(2).flatten(0, 1)


@compiled
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 70), WIDTHS)
def test_attention_equals_the_formula(
    data: st.DataObject, rows: int, heads: int, queries: int, keys: int, dim: int
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    q = torch.randn(rows * queries, heads * dim) * 3
    k, v = (torch.randn(rows, heads, keys + 3, dim).to(dtype)[:, :, :keys] for _ in range(2))  # slots still empty
    allowed, lengths = torch.ones(rows, queries, keys, dtype=torch.bool), None
    kind = data.draw(st.sampled_from(["all", "lengths", "allowed"]))
    if kind == "lengths":
        lengths = torch.randint(1, keys + 1, (rows,))
        allowed &= torch.arange(keys) < lengths[:, None, None]
    elif kind == "allowed":
        allowed &= torch.rand(allowed.shape) < 0.4
        allowed[:, :, data.draw(st.integers(0, keys - 1))] = True
    small = native.empty_quantized_rows(*q.shape)
    found = native.attend(GemmOutput(q), k, v, allowed if kind == "allowed" else None, lengths, small=small)
    torch.testing.assert_close(found.double(), formula(q, k, v, allowed), rtol=1e-5, atol=2e-6)
    again = native.quantize(GemmOutput(found))
    assert torch.equal(small.numbers, again.numbers)
    assert torch.equal(small.scales, again.scales)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_keys_and_values_are_put_in_place_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    asked, scales, bias = torch.randn(2 * 3, 3 * 4 * 32), torch.rand(6) + 0.5, torch.randn(3 * 4 * 32)
    k, v = (torch.randn(2, 4, 9, 32).to(dtype) for _ in range(2))
    q, *new = (asked * scales[:, None] + bias).chunk(3, dim=1)
    expected = [held.clone() for held in (k, v)]
    for held, rows in zip(expected, new, strict=True):
        held[:, :, 4:7] = rows.view(2, 3, 4, 32).transpose(1, 2)
    found = native.attend(GemmOutput(asked, scales, bias), k[:, :, :7], v[:, :, :7], place=4)
    if dtype is torch.bfloat16:  # rounded as torch does, to the bit
        assert torch.equal(k, expected[0])
        assert torch.equal(v, expected[1])
    torch.testing.assert_close([k, v], expected)
    everything = torch.ones(2, 3, 7, dtype=torch.bool)
    torch.testing.assert_close(found.double(), formula(q, k[:, :, :7], v[:, :, :7], everything), rtol=1e-5, atol=2e-6)


@compiled
@given(st.data(), st.integers(1, 9), WIDTHS)
def test_what_is_between_two_products_equals_the_formula(data: st.DataObject, rows: int, dim: int) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    numbers, residual = torch.randn(rows, dim) * 5, torch.randn(rows, dim)
    scales, bias = torch.rand(rows) + 0.1, torch.randn(dim)
    norm = NormParams(torch.randn(dim), torch.randn(dim) if data.draw(st.booleans()) else None, 1e-5)
    with_scales, with_bias, with_residual, relu, with_norm = (data.draw(st.booleans()) for _ in range(5))
    expected = numbers.double()
    if with_scales:
        expected = expected * scales[:, None]
    if with_bias:
        expected = expected + bias
    if with_residual:
        expected = expected + residual
    if relu:
        expected = expected.relu()
    last = expected
    if with_norm:
        shift = None if norm.bias is None else norm.bias.double()
        last = torch.layer_norm(expected, (dim,), norm.weight.double(), shift, norm.eps)
    raw = GemmOutput(numbers, scales if with_scales else None, bias if with_bias else None)
    sums, normed, small = torch.empty(rows, dim), torch.empty(rows, dim), native.empty_quantized_rows(rows, dim)
    before = numbers.clone()
    native.residual_norm_quantize(
        raw,
        residual if with_residual else None,
        relu,
        norm if with_norm else None,
        sum=sums,
        normed=normed if with_norm else None,
        small=small,
    )
    assert torch.equal(numbers, before), "only what is asked for is written"
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)
    if with_norm:
        torch.testing.assert_close(normed.double(), last, rtol=1e-4, atol=1e-4)
    back = (small.numbers.double() - 128) * small.scales.double()[:, None]
    assert ((back - last).abs() <= 0.501 * small.scales[:, None] + 1e-4).all(), "each number is the nearest byte's"
    assert torch.equal(native.dequantize(GemmOutput(numbers)), before)


@compiled
def test_bytes_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 96)
    numbers, scale = quantize_rows(x)
    small = native.quantize(GemmOutput(x))
    torch.testing.assert_close(small.scales, scale[:, 0])
    differ = small.numbers.int() - 128 != numbers.int()
    assert differ.float().mean() < 1e-3, "but where a number lies between two"
    zeros = native.quantize(GemmOutput(torch.zeros(2, 32)))
    assert zeros.scales.tolist() == [0, 0]


@compiled
def test_numbers_that_are_none_show() -> None:
    x = torch.randn(3, 64)
    x[1, 40] = torch.nan
    small = native.quantize(GemmOutput(x))
    assert small.scales.isnan().tolist() == [False, True, False]
    normed = torch.empty(3, 64)
    native.residual_norm_quantize(GemmOutput(x), norm=NormParams(torch.ones(64), None, 1e-5), normed=normed)
    assert normed.isnan().any(dim=1).tolist() == [False, True, False]
    relu = torch.empty(3, 64)
    native.residual_norm_quantize(GemmOutput(x), relu=True, sum=relu)
    assert relu.isnan().any(dim=1).tolist() == [False, True, False]
    q, k = torch.randn(2, 32), torch.randn(1, 1, 5, 32)
    q[1, 3] = torch.nan
    assert native.attend(GemmOutput(q), k, k).isnan().any(dim=1).tolist() == [False, True]
    assert native.attend(GemmOutput(q[:1]), k, k * torch.nan).isnan().all()


@compiled
def test_threads_and_rows_beside_it_never_change_a_row() -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    q, k, v = torch.randn(6 * 3, 4 * 64), torch.randn(6, 4, 50, 64), torch.randn(6, 4, 50, 64)
    x, norm = torch.randn(90, 128), NormParams(torch.randn(128), None, 1e-5)
    seen, rounded, chosen = [], [], []
    scores, totals = torch.randn(3, 4, 900), torch.randn(3, 4)
    try:
        for threads in (1, 2, 3, 5, 9):  # more than there are rows, too
            torch.set_num_threads(threads)
            small = native.empty_quantized_rows(*q.shape)
            seen.append(native.attend(GemmOutput(q), k, v, small=small))
            again = native.quantize(GemmOutput(seen[-1]))
            assert torch.equal(small.numbers, again.numbers)
            assert torch.equal(small.scales, again.scales)
            chosen.append(native.top_continuations(scores, totals, 9))
            rounded.append(native.quantize(GemmOutput(x), norm=norm))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found, seen[0]) for found in seen)
    assert all(torch.equal(a, b) for found in chosen for a, b in zip(found, chosen[0], strict=True))
    assert all(torch.equal(found.numbers, rounded[0].numbers) for found in rounded)
    alone = native.attend(GemmOutput(q[6:9]), k[2:3], v[2:3])
    assert torch.equal(alone, seen[0][6:9])
    one: QuantizedRows = native.quantize(GemmOutput(x[7:8].clone()), norm=norm)
    assert torch.equal(one.numbers, rounded[0].numbers[7:8])


@compiled
def test_of_equal_sums_the_first_is_the_best_and_one_that_is_none_shows() -> None:
    scores, totals = torch.zeros(2, 3, 200), torch.zeros(2, 3)
    sums, beams, words = native.top_continuations(scores, totals, 4)
    assert sums.tolist() == [[0.0] * 4] * 2
    assert beams.tolist() == [[0] * 4] * 2
    assert words.tolist() == [[0, 1, 2, 3]] * 2
    scores[1, 2, 150] = torch.nan
    sums, beams, words = native.top_continuations(scores, totals, 4)
    assert sums.isnan().tolist() == [[False] * 4, [True, False, False, False]]
    assert (beams[1, 0], words[1, 0]) == (2, 150)
    scores[1] = torch.nan
    assert native.top_continuations(scores, totals, 4)[0][1].isnan().all()


@compiled
def test_lengths_beyond_the_source_are_cut() -> None:
    q, k = torch.randn(3, 32), torch.randn(3, 1, 5, 32)
    found = native.attend(GemmOutput(q), k, k, lengths=torch.tensor([400, 5, 2]))
    assert torch.equal(found, native.attend(GemmOutput(q), k, k, lengths=torch.tensor([5, 5, 2])))
    native.attend(GemmOutput(q), k, k, lengths=torch.tensor([-3, 5, 2]))  # it sees nothing, and nothing is destroyed


@compiled
def test_rows_that_are_nearly_alike_are_normed_as_torch_does() -> None:
    x = 1e-4 * torch.randn(4, 64) + 3
    normed = torch.empty(4, 64)
    native.residual_norm_quantize(GemmOutput(x), norm=NormParams(torch.ones(64), None, 1e-5), normed=normed)
    torch.testing.assert_close(normed, torch.layer_norm(x, (64,)), rtol=1e-3, atol=1e-3)


@compiled
def test_what_it_cannot_read_is_refused() -> None:
    q, k = torch.randn(2, 64), torch.randn(2, 1, 5, 64)
    for bad in (k.double(), k.half()):
        with pytest.raises(AssertionError):
            native.attend(GemmOutput(q), bad, bad)
    with pytest.raises(AssertionError):
        native.attend(GemmOutput(q), k, k, allowed=torch.ones(2, 1, 5))
    with pytest.raises(AssertionError):
        native.attend(GemmOutput(q), k, k, lengths=torch.tensor([5]))
    with pytest.raises(AssertionError):
        native.attend(GemmOutput(torch.randn(2, 192)), k, k, place=5)
    with pytest.raises(AssertionError):
        native.residual_norm_quantize(GemmOutput(q.double()), sum=q)
    with pytest.raises(AssertionError):
        native.residual_norm_quantize(GemmOutput(q), residual=torch.randn(1, 64), sum=q)
