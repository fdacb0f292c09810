"""Attention backends equal the reference, in every dtype they support, forward and backward."""

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from clearhead.model import Documents, Mask, Pattern, attend, attention_backend
from clearhead.ops.attention import attention, choose_backend, dispatch
from clearhead.ops.attention.sdpa import sdpa
from tests.equality import TOLERANCE, check, inputs

patterns = st.one_of(
    st.just(Pattern()),
    st.builds(Pattern, st.just("window"), st.integers(1, 90)),
    st.builds(Pattern, st.just("column"), st.integers(1, 70)),
    st.builds(Pattern, st.just("block"), st.integers(1, 70)),
    st.integers(1, 70).flatmap(
        lambda size: st.builds(Pattern, st.just("summary"), st.just(size), st.integers(1, size))
    ),
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["sdpa", "sparse", None])
@given(pattern=patterns, causal=st.booleans(), tokens=st.integers(1, 200), padded=st.booleans(), data=st.data())
def test_backends_equal_the_reference(
    name: str | None, dtype: torch.dtype, pattern: Pattern, causal: bool, tokens: int, padded: bool, data: st.DataObject
) -> None:
    rows, groups = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2]))
    lengths = torch.tensor([data.draw(st.integers(0, tokens)) for _ in range(rows)]) if padded else None
    padding_mask = torch.arange(tokens) < (torch.full((rows, 1), tokens) if lengths is None else lengths[:, None])
    q, k, v = inputs(rows, groups * data.draw(st.sampled_from([1, 3])), groups, tokens, dtype)
    check(q, k, v, Mask(causal, pattern, lengths), padding_mask, name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["packed_cpu", "padded", None])
@given(pattern=patterns, causal=st.booleans(), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_packed_rows_equal_the_reference(
    name: str | None, dtype: torch.dtype, pattern: Pattern, causal: bool, lengths: list[int]
) -> None:
    documents = Documents.from_lengths(lengths)
    q, k, v = inputs(1, 4, 2, documents.total, dtype)
    padding_mask = torch.ones(1, documents.total, dtype=torch.bool)
    check(q, k, v, Mask(causal, pattern, documents=(documents, documents)), padding_mask, name)


@given(
    runs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 140), st.integers(1, 140)), min_size=1, max_size=5),
    heads=st.sampled_from([1, 2]),
    causal=st.booleans(),
)
def test_runs_of_documents_equal_the_reference_without_gradients(
    runs: list[tuple[int, int, int]], heads: int, causal: bool
) -> None:
    """Self- and cross-attention, short and long documents, with and without lengths in common."""
    targets = Documents.from_lengths([tokens for count, tokens, _ in runs for _ in range(count)])
    sources = targets if causal else Documents.from_lengths([tokens for count, _, tokens in runs for _ in range(count)])
    q, k, v = (
        torch.randn(1, count, documents.total, 8)
        for count, documents in ((2, targets), (heads, sources), (heads, sources))
    )
    mask = Mask(causal, documents=(targets, sources))
    out, expected = (attend(q, k, v, mask, backend=name) for name in ("packed_cpu", "reference"))
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tokens", [4, 12, 40, 150])
def test_dropout_in_a_run_applies_without_gradients_too(tokens: int) -> None:
    documents = Documents.from_lengths([tokens] * (2000 // tokens))
    q, k, v = (torch.full((1, 2, documents.total, 4), float(number == 2)) for number in range(3))
    mask = Mask(documents=(documents, documents))
    torch.testing.assert_close(attend(q, k, v, mask, backend="packed_cpu"), v)
    dropped = attend(q, k, v, mask, dropout=0.5, backend="packed_cpu")
    assert 0.9 < dropped.mean() < 1.1
    assert dropped.std() > 0.05


@given(pattern=patterns, start=st.integers(0, 40), tokens=st.integers(1, 9))
def test_queries_after_a_cache_equal_the_last_queries_of_a_row(pattern: Pattern, start: int, tokens: int) -> None:
    q, k, v = inputs(2, 4, 2, start + tokens, torch.float64)
    uncached = attend(q, k, v, Mask(True, pattern))
    cached = attend(q[:, :, start:], k, v, Mask(True, pattern, start=torch.tensor([start, start])))
    torch.testing.assert_close(cached, uncached[:, :, start:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["reference", "sdpa", "sparse", None])
def test_a_fully_masked_query_gets_zeros(name: str | None) -> None:
    q, k, v = inputs(2, 2, 2, 12, torch.float32)
    out = attend(q, k, v, Mask(lengths=torch.tensor([0, 12])), backend=name)
    assert out[0].abs().max() == 0
    assert out[1].abs().min() > 0
    early = attend(q, k, v, Mask(True, Pattern("summary", 6, 2)), backend=name)  # the first summary is at 4
    assert early[:, :, :4].abs().max() == 0
    assert early[:, :, 4:].abs().min() > 0
    early.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_nan_propagates() -> None:
    q, k, v = (x.detach().clone() for x in inputs(1, 1, 1, 4, torch.float32))
    k[0, 0, 0, 0] = math.nan
    assert attend(q, k, v, Mask(causal=True), backend="reference").isnan().all()
    for name in ("sdpa", "sparse"):  # torch's fused kernel may drop it in single rows
        assert attend(q, k, v, Mask(True, Pattern("column", 1)), backend=name).isnan().any()


def test_the_reference_equals_the_formula() -> None:
    """Two keys with scores log 3 apart get weights 3/4 and 1/4."""
    q = torch.tensor([[[[2.0, 0.0, 0.0, 0.0]]]])  # √E = 2
    k = torch.tensor([[[[math.log(3), 0, 0, 0], [0, 1, 1, 1]]]])
    v = torch.tensor([[[[8.0, 0, 0, 0], [0, 4.0, 0, 0]]]])
    out, weights = attention(q, k, v)
    torch.testing.assert_close(weights, torch.tensor([[[[0.75, 0.25]]]]))
    torch.testing.assert_close(out, torch.tensor([[[[6.0, 1.0, 0, 0]]]]))
    masked, _ = attention(q, k, v, torch.tensor([[[[False, True]]]]))
    torch.testing.assert_close(masked, torch.tensor([[[[0.0, 4.0, 0, 0]]]]))


def test_attention_dropout_drops_weights_and_keeps_the_mean() -> None:
    q, k = torch.zeros(1, 1, 2000, 8), torch.zeros(1, 1, 50, 8)
    v = torch.ones(1, 1, 50, 8)
    for name in ("reference", "sdpa"):
        out = attend(q, k, v, Mask(), dropout=0.5, backend=name)
        assert 0.95 < out.mean() < 1.05
        assert out.std() > 0.05


def test_the_backend_depends_on_the_mask() -> None:
    q, k, _ = inputs(1, 2, 2, 100, torch.float32)
    documents = Documents.from_lengths([60, 40])
    assert choose_backend(q, k, Mask(causal=True)) == "sdpa"
    assert choose_backend(q, k, Mask(True, Pattern("window", 9))) == "sparse"
    assert choose_backend(q, k, Mask(documents=(documents, documents))) == "packed_cpu"
    mixed = Documents.from_lengths([1, 2] * 33 + [1])  # a call for each document would cost more than padding
    assert choose_backend(q, k, Mask(documents=(mixed, mixed))) == "padded"
    assert choose_backend(q[:, :, :1], k, Mask(True, Pattern("window", 9), start=torch.tensor([99]))) == "sdpa"


def test_the_log_says_why_a_faster_backend_refuses(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = inputs(1, 2, 2, 21, torch.float32)
    with caplog.at_level(logging.INFO, logger="clearhead"):
        attend(q, k, v, Mask(True, Pattern("window", 13)), dropout=0.1)
    assert "window attention by sparse" in caplog.text
    assert "flex: it needs a CUDA device" in caplog.text


def test_a_forced_backend_that_refuses_falls_back_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = inputs(1, 2, 2, 10, torch.float32)
    with caplog.at_level(logging.WARNING, logger="clearhead"):
        out = attend(q, k, v, Mask(causal=True), backend="varlen")
    torch.testing.assert_close(out, attend(q, k, v, Mask(causal=True)))
    assert "varlen cannot be used here" in caplog.text
    with pytest.raises(ValueError, match="no attention backend 'fast'"):
        attend(q, k, v, Mask(), backend="fast")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", [Pattern("window", 40), Pattern("summary", 60, 7)], ids=str)
def test_long_rows_equal_the_reference_with_and_without_gradients(pattern: Pattern, causal: bool) -> None:
    """More than two chunks of 512 queries, and many window blocks."""
    q, k, v = inputs(1, 2, 1, 1100, torch.float32)
    check(q, k, v, Mask(causal, pattern), torch.ones(1, 1100, dtype=torch.bool), "sparse")
    with torch.no_grad():
        out, expected = (attend(q, k, v, Mask(causal, pattern), backend=name) for name in ("sparse", "reference"))
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["sdpa", "sparse", None])
@pytest.mark.parametrize("pattern", [Pattern(), Pattern("window", 3)], ids=str)
def test_packed_shifted_and_fewer_queries_equal_the_reference_in_every_backend(
    pattern: Pattern, name: str | None
) -> None:
    q, k, v = inputs(1, 4, 2, 12, torch.float64)
    documents = Documents.from_lengths([7, 5])
    for mask, queries in (
        (Mask(True, pattern, documents=(documents, documents)), 12),
        (Mask(True, pattern, start=torch.tensor([4])), 12),
        (Mask(False, pattern), 5),
    ):
        out, expected = (attend(q[:, :, :queries], k, v, mask, backend=backend) for backend in (name, "reference"))
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pattern", [Pattern(), Pattern("window", 50), Pattern("summary", 4, 2)], ids=str)
@pytest.mark.parametrize("lengths", [None, torch.tensor([90])], ids=["full", "padded"])
def test_dropout_reaches_every_backend(pattern: Pattern, lengths: torch.Tensor | None) -> None:
    q = k = torch.zeros(1, 1, 100, 8)
    v, mask = torch.ones(1, 1, 100, 8), Mask(False, pattern, lengths)
    assert attend(q, k, v, mask, dropout=0.5).std() > 0.05
    assert attend(q, k, v, mask).std() < 1e-6


def test_attention_backend_is_restored_after_its_with_block() -> None:
    with attention_backend("reference"):
        with attention_backend("sdpa"):
            pass
        assert dispatch._forced == "reference"
    assert dispatch._forced is None


def test_no_kernel_gets_a_fully_masked_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result differs from kernel to kernel, and can be NaN."""
    kernel = F.scaled_dot_product_attention

    def checked(*args: Any, attn_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        assert attn_mask is None or (attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0).any(dim=-1).all()
        return kernel(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    q, k, v = inputs(1, 2, 1, 1100, torch.float32)
    empty = torch.tensor([0])
    for mask in (
        Mask(lengths=empty),
        Mask(True, Pattern("summary", 600, 1)),  # the first summary is in the second chunk of queries
        Mask(False, Pattern("summary", 60, 7), empty),
        Mask(False, Pattern("window", 40), empty),
    ):
        attend(q, k, v, mask)


@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
@pytest.mark.parametrize("queries", [1, 4, 9])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("keys", [12, 144])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "spare slots"])
def test_few_queries_in_many_heads_equal_the_reference(
    kind: str, queries: int, groups: int, keys: int, layout: str
) -> None:
    """On a CPU these take matmuls, in another order for many keys; no query is fully masked."""
    q = torch.randn(16, queries, 8, 16).transpose(1, 2)
    k, v = torch.randn(2, 16, groups, keys, 16).unbind()
    if layout == "transposed":
        v = v.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "spare slots":  # as in a cache, whose unused slots may hold anything
        k, v = (F.pad(x, (0, 0, 0, 5), value=torch.nan)[:, :, :keys] for x in (k, v))
    mask = (torch.rand(16, 1, queries, keys) < 0.5) | (torch.arange(keys) == 3) if kind != "none" else None
    given = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if kind == "additive" else mask
    expected, _ = attention(q, *(x.repeat_interleave(8 // groups, 1) for x in (k, v)), mask)
    with torch.inference_mode():
        torch.testing.assert_close(sdpa(q, k, v, given, no_empty_rows=True), expected, rtol=1e-5, atol=1e-5)
