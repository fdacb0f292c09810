"""Every operation of the native step equals PyTorch's, at every SIMD level that this CPU has."""

import ctypes
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.attention.reference import attention
from clearhead.ops.linear.packed_weight import GROUP, KINDS, PackedWeight, pack_weight
from clearhead.ops.native.structs import (
    LEVELS,
    AttentionStruct,
    NormStruct,
    check,
    pad_rows,
    pointer,
    step_library,
)
from clearhead.ops.top_logprobs import top_logprobs

pytestmark = pytest.mark.skipif(step_library() is None, reason="the native step was not compiled here")
NO_LEVEL = 3


def available_levels() -> list[int]:
    lib = step_library()
    x = torch.zeros(64)
    return [] if lib is None else [n for n in range(3) if lib.clearhead_activate(0, x.data_ptr(), 1, n) != NO_LEVEL]


levels = pytest.mark.parametrize("level", available_levels(), ids=lambda level: LEVELS[level])
ODD_SIZES = st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 130, 257]))


def test_levels_of_this_cpu_include_the_portable_one() -> None:
    assert 0 in available_levels()


def quantized_rows(x: Tensor) -> Tensor:
    """Rows (M, K) rounded to int8 in groups of 32 inputs, each by its largest magnitude."""
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(dim=2, keepdim=True) / 127
    rounded = torch.where(scale > 0, (groups / scale).round(), 0) * scale
    return rounded.flatten(1)[:, : x.shape[1]]


def expected_linear(packed: PackedWeight, x: Tensor) -> Tensor:
    """The formula on dequantized weights, in float64."""
    if packed.kind.startswith("int"):
        x = quantized_rows(x)
    bias = None if packed.bias is None else packed.bias[: packed.outputs].double()
    return F.linear(x.double(), packed.dequantize().double(), bias)


def assert_close(out: Tensor, expected: Tensor, within: float = 2e-5) -> None:
    scale = float(expected.abs().max()) + 1e-6
    torch.testing.assert_close(out.double() / scale, expected / scale, rtol=0, atol=within)


@levels
@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(1, 128), outputs=ODD_SIZES, inputs=ODD_SIZES, bias=st.booleans(), seed=st.integers(0, 999))
def test_linear_equals_the_dequantized_formula(
    level: int, kind: str, rows: int, outputs: int, inputs: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    packed = pack_weight(torch.randn(outputs, inputs), torch.randn(outputs) if bias else None, kind)
    x = torch.randn(rows, inputs) * torch.rand(rows, 1) * 4
    # A value halfway between two integers may round either way here and in PyTorch.
    within = 2e-5 if not kind.startswith("int") else 2e-3
    assert_close(packed(x, threads=1 + seed % 2, simd_level=level), expected_linear(packed, x), within)


@levels
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_linear_is_exact_where_activations_need_no_rounding(level: int, kind: str) -> None:
    torch.manual_seed(1)
    packed = pack_weight(torch.randn(100, 96), torch.randn(100), kind)
    x = torch.randint(-127, 128, (33, 96)).float()
    x[:, ::GROUP] = 127  # the scale of each group is 1
    assert_close(packed(x, simd_level=level), expected_linear(packed, x), 1e-6)


@levels
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bits_in_any_batch_and_on_any_number_of_threads(level: int, kind: str) -> None:
    torch.manual_seed(2)
    packed = pack_weight(torch.randn(200, 131), torch.randn(200), kind)
    x = torch.randn(128, 131)
    expected = torch.cat([packed(row[None], threads=1, simd_level=level) for row in x])
    for rows in (2, 3, 5, 8, 13, 97, 128):
        for threads in (1, 2, 4):
            assert torch.equal(packed(x[:rows], threads, level), expected[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_packing_rounds_to_the_nearest_step(kind: str) -> None:
    torch.manual_seed(3)
    weight = torch.randn(37, 75) * torch.logspace(-9, 9, 37)[:, None]
    packed = pack_weight(weight, None, kind)
    groups = F.pad(weight, (0, -75 % GROUP)).unflatten(1, (-1, GROUP))
    spread = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)).expand_as(groups)
    largest = groups.abs().amax(2, keepdim=True).expand_as(groups)
    bound = {"fp32": 0 * largest, "bf16": largest / 256, "int8": largest / 250, "int4": spread / 29 + largest / 1000}
    # Scales far below the largest one of the matrix are subnormal in fp16.
    error = (packed.dequantize() - weight).abs()
    assert (error <= bound[kind].flatten(1)[:, :75] + float(weight.abs().max()) * 2.0**-20).all()


@levels
@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_embedding_returns_the_dequantized_rows(level: int, kind: str) -> None:
    torch.manual_seed(4)
    packed, lib = pack_weight(torch.randn(50, 77), None, kind), step_library()
    out = torch.empty(50, 77)
    for token in range(50):
        check(lib.clearhead_embed(ctypes.byref(packed.struct), token, out[token].data_ptr(), level))
    torch.testing.assert_close(out, packed.dequantize(), rtol=1e-6, atol=1e-7)
    assert lib.clearhead_embed(ctypes.byref(packed.struct), 50, out.data_ptr(), level) == 1


@levels
@given(rows=st.integers(1, 5), dim=ODD_SIZES, seed=st.integers(0, 999), bias=st.booleans())
def test_norms_equal_pytorch(level: int, rows: int, dim: int, seed: int, bias: bool) -> None:
    torch.manual_seed(seed)
    x, weight, shift = torch.randn(rows, dim) * 3 + 1, torch.randn(dim), torch.randn(dim) if bias else None
    expected = {
        1: F.layer_norm(x.double(), (dim,), weight.double(), None if shift is None else shift.double(), 1e-5),
        2: F.rms_norm(x.double(), (dim,), weight.double(), 1e-5) + (0 if shift is None else shift.double()),
        3: x.double() * weight.double() + (0 if shift is None else shift.double()),
    }
    padded_weight, padded_bias = pad_rows(weight), None if shift is None else pad_rows(shift)
    for kind, wanted in expected.items():
        norm = NormStruct(pointer(padded_weight), pointer(padded_bias), kind, 1e-5)
        out = pad_rows(x)
        check(step_library().clearhead_norm(ctypes.byref(norm), out.data_ptr(), rows, dim, level))
        if not (kind == 1 and dim == 1):  # one feature: the variance is only rounding
            torch.testing.assert_close(out[:, :dim].double(), wanted, rtol=2e-5, atol=2e-5)
        assert not out[:, dim:].any()


ACTIVATIONS = {
    0: F.relu,
    1: F.gelu,
    2: lambda x: F.gelu(x, approximate="tanh"),
    3: F.silu,
    4: lambda x: F.silu(x.chunk(2)[0]) * x.chunk(2)[1],
    5: lambda x: F.gelu(x.chunk(2)[0]) * x.chunk(2)[1],
}


@levels
@pytest.mark.parametrize("kind", ACTIVATIONS)
@given(dim=ODD_SIZES, seed=st.integers(0, 999), scale=st.sampled_from([0.01, 1.0, 30.0]))
def test_activations_equal_pytorch(level: int, kind: int, dim: int, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    x = torch.randn(dim * 2 if kind >= 4 else dim) * scale
    out = pad_rows(x)
    check(step_library().clearhead_activate(kind, out.data_ptr(), dim, level))
    torch.testing.assert_close(out[:dim].double(), ACTIVATIONS[kind](x.double()), rtol=1e-5, atol=5e-7 * (1 + scale))


@levels
@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 70),
    st.sampled_from([1, 2, 8, 10, 16, 30, 32, 48, 64, 80, 96, 128, 288]),
    st.booleans(),
    st.integers(0, 999),
)
def test_attention_equals_the_reference(
    level: int, kv_heads: int, group: int, count: int, dim: int, bf16: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    keys, values = (torch.randn(80, kv_heads, dim).to(torch.bfloat16 if bf16 else torch.float32) for _ in range(2))
    slots = torch.randperm(80)[:count]
    padded = torch.cat([slots, slots[-1:].expand(-count % 16)]).int() if count else torch.zeros(16, dtype=torch.int32)
    counts = torch.randint(count // 2, count + 1, (group,))  # each query sees a prefix
    queries, scores = torch.randn(kv_heads, group, dim), torch.empty(6, 96)
    for size in (group, 1):  # together, and alone
        out = torch.full((kv_heads, group, dim), torch.nan)
        for head, first in itertools.product(range(kv_heads), range(0, group, size)):
            rows = range(first, first + size)
            pointers = [torch.tensor([x[head, row].data_ptr() for row in rows]) for x in (queries, out)]
            args = AttentionStruct(
                *(keys[:, head].data_ptr(), values[:, head].data_ptr(), padded.data_ptr()),
                *(x.data_ptr() for x in (*pointers, counts[first:], scores)),
                *(size, kv_heads * dim, 96, dim, bf16),
            )
            check(step_library().clearhead_attend(ctypes.byref(args), level))
        if size == group:
            together = out
    assert torch.equal(together, out)
    for row in range(group):
        k, v = (x[slots[: counts[row]]].double().transpose(0, 1) for x in (keys, values))  # (G, S, E)
        expected = attention(queries[:, row : row + 1].double(), k, v)[0][:, 0] if counts[row] else 0 * out[:, row]
        torch.testing.assert_close(out[:, row].double(), expected.double(), rtol=1e-5, atol=3e-6)


@levels
@given(st.integers(1, 200), st.integers(0, 999), st.sampled_from(["numbers", "ties", "nan", "empty", "infinite"]))
def test_argmax_is_the_first_of_the_largest_and_minus_one_where_it_is_not_finite(
    level: int, count: int, seed: int, kind: str
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(count)
    if kind == "ties":
        logits = logits.round()
    if kind == "nan":
        logits[seed % count] = torch.nan
    if kind == "infinite":
        logits[seed % count] = torch.inf
    if kind == "empty":
        logits.fill_(-torch.inf)
    expected: Any = -1 if kind in ("nan", "empty", "infinite") else int((logits == logits.max()).nonzero()[0])
    assert step_library().clearhead_argmax(logits.data_ptr(), count, level) == expected


@levels
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_show_in_their_row_only(level: int, kind: str) -> None:
    packed, x = pack_weight(torch.randn(40, 64), None, kind), torch.randn(6, 64)
    expected = packed(x, simd_level=level)
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[3, 5] = bad
        out = packed(broken, simd_level=level)
        assert not out[3].isfinite().any()
        assert torch.equal(out[[0, 1, 2, 4, 5]], expected[[0, 1, 2, 4, 5]])


@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(0, 999),
    st.sampled_from(["numbers", "ties", "nan", "few"]),
)
def test_top_logprobs_equal_log_softmax_and_topk(rows: int, count: int, k: int, seed: int, kind: str) -> None:
    torch.manual_seed(seed)
    logits, k = torch.randn(rows, count + 3)[:, :count] * 5, min(k, count)  # a view of wider rows
    if kind == "ties":
        logits.copy_(logits.round())
    if kind == "nan":
        logits[0, seed % count] = torch.nan
    if kind == "few":
        logits[torch.rand(rows, count) < 0.7] = -torch.inf
        logits[:, seed % count] = 0
    values, tokens = top_logprobs(logits, k)
    if kind == "nan":
        assert values[0].isnan().all()
        values, tokens, logits = values[1:], tokens[1:], logits[1:]
    order = logits.double().sort(dim=1, descending=True, stable=True)
    assert torch.equal(tokens, order.indices[:, :k])
    expected = order.values[:, :k] - logits.double().logsumexp(1, keepdim=True)
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=5e-6)
