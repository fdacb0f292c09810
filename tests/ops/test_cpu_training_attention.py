"""CPU training attention: output and gradients equal the formula, and dropout has the right rate."""

import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.model import Documents, Mask, Pattern, attend
from clearhead.ops.attention import choose_backend, cpu_training
from clearhead.ops.attention.cpu_training import RANDOM_LEVELS, cpu_training_refuses, matmul_attention
from clearhead.ops.attention.dispatch import BACKENDS, Backend
from tests.equality import check, inputs


def _inputs(rows: int, heads: int, queries: int, keys: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, heads, tokens, 8, requires_grad=True) for tokens in (queries, keys, keys)]


@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 3),
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    causal=st.booleans(),
    dropout=st.sampled_from([0.0, 0.25]),
    chunk=st.sampled_from([1, 1000, 1 << 20]),
)
def test_it_equals_the_formula_with_dropout(
    rows: int, heads: int, queries: int, keys: int, causal: bool, dropout: float, chunk: int
) -> None:
    """Output and gradients, for any chunk size."""
    keys = queries if causal else keys
    ours = _inputs(rows, heads, queries, keys)
    theirs = [x.detach().requires_grad_() for x in ours]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_training, "CHUNK_WEIGHTS", chunk)
        torch.manual_seed(1)
        out = matmul_attention(*ours, Mask(causal), dropout)
        torch.manual_seed(1)
        keep = cpu_training._keep_mask((rows, heads, queries, keys), round(RANDOM_LEVELS * dropout))
        later = torch.ones(queries, keys, dtype=torch.bool).triu(1) & causal
        scores = (theirs[0] @ theirs[1].mT / 8**0.5).masked_fill(later, -math.inf)
        expected = (scores.softmax(-1) * keep / (1 - dropout)) @ theirs[2]
        grad = torch.randn_like(expected)
        (out * grad).sum().backward()
        (expected * grad).sum().backward()
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-5, atol=2e-5)


@given(tokens=st.integers(17, 128), causal=st.booleans(), data=st.data())
def test_rows_that_choose_it_equal_the_reference(tokens: int, causal: bool, data: st.DataObject) -> None:
    """With a causal mask, rows may be padded."""
    rows = -(-1024 // (2 * tokens))
    lengths = torch.tensor([data.draw(st.integers(0, tokens)) for _ in range(rows)]) if causal else None
    padding_mask = torch.arange(tokens) < (torch.full((rows, 1), tokens) if lengths is None else lengths[:, None])
    q, k, v = inputs(rows, 2, 2, tokens, torch.float32)
    mask = Mask(causal, lengths=lengths)
    assert choose_backend(q, k, mask) == "cpu_training"
    check(q, k, v, mask, padding_mask, None)


@pytest.mark.parametrize("dropout", [0.05, 0.1, 0.5, 0.9])
def test_dropout_has_its_rate_at_every_position_and_drops_independently(dropout: float) -> None:
    torch.manual_seed(0)
    keep = cpu_training._keep_mask((400_003,), round(dropout * RANDOM_LEVELS)).float()
    for start in range(4):  # one random number decides four
        assert abs(keep[start::4].mean() - (1 - dropout)) < 0.006
    assert abs((keep[1:] * keep[:-1]).mean() - (1 - dropout) ** 2) < 0.006


def test_the_same_seed_drops_the_same_weights() -> None:
    q, k, v = _inputs(2, 2, 20, 20)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(matmul_attention(q, k, v, Mask(), 0.3))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("causal", [True, False])
def test_runs_of_a_packed_row_choose_it(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, float]] = []
    backend = Backend(lambda q, k, v, mask, dropout: calls.append((len(q), dropout)) or q, cpu_training_refuses)
    monkeypatch.setitem(BACKENDS, "cpu_training", backend)
    documents = Documents.from_lengths([30] * 20 + [40] * 30 + [50] * 2)
    q, k, v = _inputs(1, 2, documents.total, documents.total)
    for dropout in (0.0, 0.1):
        attend(q, k, v, Mask(causal, documents=(documents, documents)), dropout)
    assert calls == [(20, 0.0), (30, 0.0), (20, 0.1), (30, 0.1)]  # two documents are too few


def test_it_refuses_what_it_does_not_support_or_does_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = _inputs(16, 2, 64, 64)
    for dropout in (0.0, 0.1):
        for mask in (Mask(), Mask(causal=True), Mask(causal=True, lengths=torch.tensor([3] * 16))):
            assert cpu_training_refuses(q, k, mask, dropout) is None
        for mask in (
            Mask(lengths=torch.tensor([3] * 16)),
            Mask(True, start=torch.tensor([0] * 16)),
            Mask(True, Pattern("window", 3)),
            Mask(documents=(Documents.from_lengths([64]),) * 2),
        ):
            assert cpu_training_refuses(q, k, mask, dropout)
        assert cpu_training_refuses(q, k[:, :, :60], Mask(causal=True), dropout)
        assert cpu_training_refuses(q, k[:, :1], Mask(), dropout)
        assert cpu_training_refuses(q.double(), k.double(), Mask(), dropout)
        assert cpu_training_refuses(q[:2], k[:2], Mask(), dropout)
        with torch.no_grad():
            assert bool(cpu_training_refuses(q, k, Mask(), dropout)) == (dropout == 0)
        with torch.autocast("cpu"):
            assert cpu_training_refuses(q, k, Mask(), dropout)
    assert cpu_training_refuses(q.detach(), k, Mask(), 0.0)
    long, _, _ = _inputs(16, 2, 130, 130)
    assert cpu_training_refuses(long, long, Mask(), 0.0)
    assert cpu_training_refuses(long, long, Mask(), 0.1) is None
    many = torch.zeros(300, 1, 128, 1, requires_grad=True)
    assert cpu_training_refuses(many, many, Mask(), 0.0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert cpu_training_refuses(q, k, Mask(), 0.1)
    assert cpu_training_refuses(q, k, Mask(), 0.0) is None


def test_it_is_compiled_for_static_shapes_only() -> None:
    code = """
import torch
from clearhead.model import Mask, attend
graphs = []
def backend(graph, inputs):
    graphs.append("scaled_dot_product" not in graph.code)
    return graph.forward
for dynamic, shapes, matmuls in ((False, [(8, 64)], {True}), (True, [(8, 64), (3, 9), (40, 30), (9, 200)], {False})):
    torch._dynamo.reset()
    graphs.clear()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for rows, tokens in shapes:
        ours = [torch.randn(rows, 2, tokens, 8, requires_grad=True) for _ in range(3)]
        theirs = [x.detach().requires_grad_() for x in ours]
        for x in ours if dynamic else ():
            torch._dynamo.mark_dynamic(x, (0, 2))
        out = compiled(*ours, Mask(causal=True))
        expected = attend(*theirs, Mask(causal=True), backend="reference")
        for x in (out, expected):
            x.square().sum().backward()
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-5, atol=2e-5)
    assert set(graphs) == matmuls and len(graphs) <= 2, graphs
"""
    env = os.environ | {"TORCHDYNAMO_DISABLE": "0", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_activation_checkpointing_repeats_the_dropout() -> None:
    originals = [x.detach() for x in _inputs(16, 2, 64, 64)]
    results = []
    for recompute in (False, True):
        torch.manual_seed(1)
        q, k, v = (x.clone().requires_grad_() for x in originals)
        run = partial(checkpoint, attend, use_reentrant=True) if recompute else attend
        out = run(q, k, v, Mask(), 0.2)
        out.square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_torch_func_transforms_take_another_backend() -> None:
    q, k, v = (x.detach() for x in _inputs(16, 2, 64, 64))
    grad = torch.func.grad(lambda q: attend(q, k, v, Mask(causal=True)).square().sum())(q)
    q.requires_grad_()
    attend(q, k, v, Mask(causal=True)).square().sum().backward()
    torch.testing.assert_close(grad, q.grad, rtol=2e-5, atol=2e-5)


def test_masked_keys_stay_masked_with_large_scores() -> None:
    q, k, v = _inputs(16, 2, 64, 64)
    out = matmul_attention(q * 1000, k * 1000, v, Mask(causal=True), 0.0)
    expected = attend(q * 1000, k * 1000, v, Mask(causal=True), backend="reference")
    torch.testing.assert_close(out[:, :, :2], expected[:, :, :2], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_nan_propagates(causal: bool) -> None:
    for broken in range(3):
        tensors = [x.detach().clone() for x in _inputs(16, 2, 64, 64)]
        tensors[broken][3, 1, 20, 0] = math.nan
        q, k, v = (x.requires_grad_() for x in tensors)
        assert choose_backend(q, k, Mask(causal)) == "cpu_training"
        out = attend(q, k, v, Mask(causal))
        expected = attend(q, k, v, Mask(causal), backend="reference")
        assert expected.isnan().any()
        assert (out.isnan() >= expected.isnan()).all()  # earlier queries may have it, too
        assert torch.equal(out.isnan().any(dim=(2, 3)), expected.isnan().any(dim=(2, 3)))
        out.sum().backward()
        assert k.grad is not None
        assert k.grad[3, 1].isnan().any()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_second_derivative_is_refused_rather_than_wrong(dropout: float) -> None:
    q, k, v = (torch.randn(2, 2, 20, 8, requires_grad=True) for _ in range(3))
    out = matmul_attention(q, k, v, Mask(), dropout).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out, q, create_graph=True)
