"""Attention with dropout on a CPU: the formula with some weights at 0, its gradients, and how many those are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clearhead.model import Documents, Mask, attend, backends, dropped
from clearhead.model.dropped import CHANCES, dropped_attention, drops


def _inputs(rows: int, heads: int, queries: int, keys: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, heads, tokens, 8, requires_grad=True) for tokens in (queries, keys, keys)]


@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 3),
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    at_once=st.sampled_from([1, 1000, 1 << 20]),
)
def test_it_is_the_formula_with_some_weights_dropped(
    rows: int, heads: int, queries: int, keys: int, at_once: int
) -> None:
    """Output and gradients, however many rows are computed at once."""
    ours = _inputs(rows, heads, queries, keys)
    theirs = [x.detach().requires_grad_() for x in ours]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropped, "WEIGHTS", at_once)
        torch.manual_seed(1)
        found = dropped_attention(*ours, 0.25)
        torch.manual_seed(1)
        keep = dropped._drawn((rows, heads, queries, keys), CHANCES // 4)
        expected = ((theirs[0] @ theirs[1].mT / 8**0.5).softmax(-1) * keep / 0.75) @ theirs[2]
        choice = torch.randn_like(expected)
        (found * choice).sum().backward()
        (expected * choice).sum().backward()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dropout", [0.05, 0.1, 0.5, 0.9])
def test_as_many_weights_are_dropped_as_asked_for_wherever_they_stand(dropout: float) -> None:
    torch.manual_seed(0)
    keep = dropped._drawn((400_003,), round(dropout * CHANCES)).float()
    for start in range(4):  # one random number decides about four
        assert abs(keep[start::4].mean() - (1 - dropout)) < 0.006
    assert abs((keep[1:] * keep[:-1]).mean() - (1 - dropout) ** 2) < 0.006


def test_the_same_seed_drops_the_same_weights() -> None:
    q, k, v = _inputs(2, 2, 20, 20)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(dropped_attention(q, k, v, 0.3))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_packed_row_with_dropout_goes_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(backends, "dropped_attention", lambda q, k, v, dropout: taken.append(dropout) or q)
    documents = Documents.of([20, 20, 30])
    q, k, v = (x.detach() for x in _inputs(1, 2, 70, 70))
    attend(q, k, v, Mask(documents=(documents, documents)), dropout=0.1)
    assert taken == [0.1, 0.1]
    attend(q, k, v, Mask(True, documents=(documents, documents)), dropout=0.1)
    attend(q.double(), k.double(), v.double(), Mask(documents=(documents, documents)), dropout=0.1)
    assert len(taken) == 2


def test_it_refuses_what_it_would_do_wrong() -> None:
    q, k, _ = _inputs(1, 2, 20, 20)
    assert drops(q, k, Mask(), 0.1)
    assert not drops(q, k, Mask(), 0.0)
    assert not drops(q, k, Mask(causal=True), 0.1)
    assert not drops(q, k, Mask(lengths=torch.tensor([3])), 0.1)
    assert not drops(q, k[:, :1], Mask(), 0.1)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    q, k, v = (torch.randn(2, 2, 20, 8, requires_grad=True) for _ in range(3))
    out = dropped_attention(q, k, v, 0.1).sum()
    with pytest.raises(RuntimeError, match="no second derivative; set attention_dropout to 0"):
        torch.autograd.grad(out, q, create_graph=True)
