"""The native C kernels equal the PyTorch formulas, and the library is built wherever a compiler is available."""

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
DIMS = st.sampled_from([32, 64, 96, 160])


def test_the_library_is_built_where_there_is_a_compiler() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64" or shutil.which("gcc") is None:
        pytest.skip("no gcc, or not x86-64 Linux")
    if os.environ.get("CLEARHEAD_NATIVE") == "0" or "gcc" not in str(sysconfig.get_config_var("CC")):
        pytest.skip("turned off, or Python was built with another compiler")
    version = subprocess.run(["gcc", "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if int(version.split(".")[0]) < 12:
        pytest.skip(f"GCC {version.strip()} is too old")
    assert native.library() is not None


def test_the_library_can_be_turned_off() -> None:
    code = "from clearhead.ops.native import library; print(library.library(), library.supports(64))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CLEARHEAD_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["None", "False"]


def test_dims_that_are_no_multiple_of_32_are_refused() -> None:
    assert not native.supports(64, 48)
    assert native.supports(64, 32) == (native.library() is not None)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention in float64 for queries (B · T, H · E): (B · T, H · E)."""
    batch, heads, _, head_dim = k.shape
    q = q.view(batch, -1, heads, head_dim).transpose(1, 2)
    out = attention(q.double(), k.double(), v.double(), mask[:, None])[0]
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


@compiled
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 70), DIMS)
def test_attention_equals_the_reference(
    data: st.DataObject, batch: int, heads: int, queries: int, keys: int, head_dim: int
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    q = torch.randn(batch * queries, heads * head_dim) * 3
    k, v = (torch.randn(batch, heads, keys + 3, head_dim).to(dtype)[:, :, :keys] for _ in range(2))  # 3 unused slots
    mask, lengths = torch.ones(batch, queries, keys, dtype=torch.bool), None
    kind = data.draw(st.sampled_from(["all", "lengths", "mask"]))
    if kind == "lengths":
        lengths = torch.randint(1, keys + 1, (batch,))
        mask &= torch.arange(keys) < lengths[:, None, None]
    elif kind == "mask":
        mask &= torch.rand(mask.shape) < 0.4
        mask[:, :, data.draw(st.integers(0, keys - 1))] = True
    quantized = native.empty_quantized_rows(*q.shape)
    out = native.attend(GemmOutput(q), k, v, mask if kind == "mask" else None, lengths, quantized_out=quantized)
    torch.testing.assert_close(out.double(), reference(q, k, v, mask), rtol=1e-5, atol=2e-6)
    expected = native.quantize(GemmOutput(out))
    assert torch.equal(quantized.values, expected.values)
    assert torch.equal(quantized.scales, expected.scales)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_keys_and_values_are_written_to_the_cache_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv, scales, bias = torch.randn(2 * 3, 3 * 4 * 32), torch.rand(6) + 0.5, torch.randn(3 * 4 * 32)
    k, v = (torch.randn(2, 4, 9, 32).to(dtype) for _ in range(2))
    q, *new = (qkv * scales[:, None] + bias).chunk(3, dim=1)
    expected = [cache.clone() for cache in (k, v)]
    for cache, rows in zip(expected, new, strict=True):
        cache[:, :, 4:7] = rows.view(2, 3, 4, 32).transpose(1, 2)
    out = native.attend(GemmOutput(qkv, scales, bias), k[:, :, :7], v[:, :, :7], write_slot=4)
    if dtype is torch.bfloat16:  # rounded bit for bit as torch does
        assert torch.equal(k, expected[0])
        assert torch.equal(v, expected[1])
    torch.testing.assert_close([k, v], expected)
    mask = torch.ones(2, 3, 7, dtype=torch.bool)
    torch.testing.assert_close(out.double(), reference(q, k[:, :, :7], v[:, :, :7], mask), rtol=1e-5, atol=2e-6)


@compiled
@given(st.data(), st.integers(1, 9), DIMS)
def test_residual_norm_quantize_equals_the_formula(data: st.DataObject, rows: int, dim: int) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    x, residual = torch.randn(rows, dim) * 5, torch.randn(rows, dim)
    scales, bias = torch.rand(rows) + 0.1, torch.randn(dim)
    norm = NormParams(torch.randn(dim), torch.randn(dim) if data.draw(st.booleans()) else None, 1e-5)
    with_scales, with_bias, with_residual, relu, with_norm = (data.draw(st.booleans()) for _ in range(5))
    expected = x.double()
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
        norm_bias = None if norm.bias is None else norm.bias.double()
        last = torch.layer_norm(expected, (dim,), norm.weight.double(), norm_bias, norm.eps)
    raw = GemmOutput(x, scales if with_scales else None, bias if with_bias else None)
    sums, normed, quantized = torch.empty(rows, dim), torch.empty(rows, dim), native.empty_quantized_rows(rows, dim)
    before = x.clone()
    native.residual_norm_quantize(
        raw,
        residual if with_residual else None,
        relu,
        norm if with_norm else None,
        sum_out=sums,
        normed_out=normed if with_norm else None,
        quantized_out=quantized,
    )
    assert torch.equal(x, before), "only the requested outputs are written"
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)
    if with_norm:
        torch.testing.assert_close(normed.double(), last, rtol=1e-4, atol=1e-4)
    dequantized = (quantized.values.double() - 128) * quantized.scales.double()[:, None]
    assert ((dequantized - last).abs() <= 0.501 * quantized.scales[:, None] + 1e-4).all(), "rounded to nearest"
    assert torch.equal(native.dequantize(GemmOutput(x)), before)


@compiled
def test_int8_rows_equal_the_formula() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 96)
    expected, scale = quantize_rows(x)
    quantized = native.quantize(GemmOutput(x))
    torch.testing.assert_close(quantized.scales, scale[:, 0])
    differ = quantized.values.int() - 128 != expected.int()
    assert differ.float().mean() < 1e-3, "except where a value lies halfway between two integers"
    zeros = native.quantize(GemmOutput(torch.zeros(2, 32)))
    assert zeros.scales.tolist() == [0, 0]


@compiled
def test_nan_propagates() -> None:
    x = torch.randn(3, 64)
    x[1, 40] = torch.nan
    quantized = native.quantize(GemmOutput(x))
    assert quantized.scales.isnan().tolist() == [False, True, False]
    normed = torch.empty(3, 64)
    native.residual_norm_quantize(GemmOutput(x), norm=NormParams(torch.ones(64), None, 1e-5), normed_out=normed)
    assert normed.isnan().any(dim=1).tolist() == [False, True, False]
    relu = torch.empty(3, 64)
    native.residual_norm_quantize(GemmOutput(x), relu=True, sum_out=relu)
    assert relu.isnan().any(dim=1).tolist() == [False, True, False]
    q, k = torch.randn(2, 32), torch.randn(1, 1, 5, 32)
    q[1, 3] = torch.nan
    assert native.attend(GemmOutput(q), k, k).isnan().any(dim=1).tolist() == [False, True]
    assert native.attend(GemmOutput(q[:1]), k, k * torch.nan).isnan().all()


@compiled
def test_threads_and_batch_mates_never_change_a_row() -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    q, k, v = torch.randn(6 * 3, 4 * 64), torch.randn(6, 4, 50, 64), torch.randn(6, 4, 50, 64)
    x, norm = torch.randn(90, 128), NormParams(torch.randn(128), None, 1e-5)
    attended, quantized, best = [], [], []
    logprobs, beam_scores = torch.randn(3, 4, 900), torch.randn(3, 4)
    try:
        for threads in (1, 2, 3, 5, 9):  # also more threads than rows
            torch.set_num_threads(threads)
            quantized_out = native.empty_quantized_rows(*q.shape)
            attended.append(native.attend(GemmOutput(q), k, v, quantized_out=quantized_out))
            expected = native.quantize(GemmOutput(attended[-1]))
            assert torch.equal(quantized_out.values, expected.values)
            assert torch.equal(quantized_out.scales, expected.scales)
            best.append(native.beam_topk(logprobs, beam_scores, 9))
            quantized.append(native.quantize(GemmOutput(x), norm=norm))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, attended[0]) for out in attended)
    assert all(torch.equal(a, b) for result in best for a, b in zip(result, best[0], strict=True))
    assert all(torch.equal(rows.values, quantized[0].values) for rows in quantized)
    alone = native.attend(GemmOutput(q[6:9]), k[2:3], v[2:3])
    assert torch.equal(alone, attended[0][6:9])
    one: QuantizedRows = native.quantize(GemmOutput(x[7:8].clone()), norm=norm)
    assert torch.equal(one.values, quantized[0].values[7:8])


@compiled
def test_topk_breaks_ties_by_order_and_shows_nan() -> None:
    logprobs, beam_scores = torch.zeros(2, 3, 200), torch.zeros(2, 3)
    scores, beams, tokens = native.beam_topk(logprobs, beam_scores, 4)
    assert scores.tolist() == [[0.0] * 4] * 2
    assert beams.tolist() == [[0] * 4] * 2
    assert tokens.tolist() == [[0, 1, 2, 3]] * 2
    logprobs[1, 2, 150] = torch.nan
    scores, beams, tokens = native.beam_topk(logprobs, beam_scores, 4)
    assert scores.isnan().tolist() == [[False] * 4, [True, False, False, False]]
    assert (beams[1, 0], tokens[1, 0]) == (2, 150)
    logprobs[1] = torch.nan
    assert native.beam_topk(logprobs, beam_scores, 4)[0][1].isnan().all()


@compiled
def test_lengths_are_clamped_to_the_number_of_keys() -> None:
    q, k = torch.randn(3, 32), torch.randn(3, 1, 5, 32)
    out = native.attend(GemmOutput(q), k, k, lengths=torch.tensor([400, 5, 2]))
    assert torch.equal(out, native.attend(GemmOutput(q), k, k, lengths=torch.tensor([5, 5, 2])))
    native.attend(GemmOutput(q), k, k, lengths=torch.tensor([-3, 5, 2]))  # no key is visible; nothing is overwritten


@compiled
def test_norm_of_nearly_equal_values_equals_torch() -> None:
    x = 1e-4 * torch.randn(4, 64) + 3
    normed = torch.empty(4, 64)
    native.residual_norm_quantize(GemmOutput(x), norm=NormParams(torch.ones(64), None, 1e-5), normed_out=normed)
    torch.testing.assert_close(normed, torch.layer_norm(x, (64,)), rtol=1e-3, atol=1e-3)


@compiled
def test_unsupported_inputs_are_refused() -> None:
    q, k = torch.randn(2, 64), torch.randn(2, 1, 5, 64)
    for bad in (k.double(), k.half()):
        with pytest.raises(AssertionError):
            native.attend(GemmOutput(q), bad, bad)
    with pytest.raises(AssertionError):
        native.attend(GemmOutput(q), k, k, mask=torch.ones(2, 1, 5))
    with pytest.raises(AssertionError):
        native.attend(GemmOutput(q), k, k, lengths=torch.tensor([5]))
    with pytest.raises(AssertionError):
        native.attend(GemmOutput(torch.randn(2, 192)), k, k, write_slot=5)
    with pytest.raises(AssertionError):
        native.residual_norm_quantize(GemmOutput(q.double()), sum_out=q)
    with pytest.raises(AssertionError):
        native.residual_norm_quantize(GemmOutput(q), residual=torch.randn(1, 64), sum_out=q)
