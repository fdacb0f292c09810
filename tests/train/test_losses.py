"""Losses against torch's own and numbers worked out by hand; chunked against unchunked, gradients included."""

import math
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.config import ModelConfig, preset
from clearhead.model import build
from clearhead.model.heads import LMHead
from clearhead.train import losses
from clearhead.train.losses import (
    class_loss,
    contrastive_loss,
    cosine_loss,
    lm_loss,
    next_sentence_loss,
    regression_loss,
    span_loss,
    tag_loss,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}
VOCAB, DIM = 11, 6


def head_of(family: str = "decoder", bias: bool = True, dtype: torch.dtype = torch.float64) -> LMHead:
    """An LM head with random weights; an encoder's has a transform before its logits."""
    layers = {"decoder": "decoder_layers", "encoder": "encoder_layers"}[family]
    settings = {"family": family, layers: 1, "dim": DIM, "heads": 1, "vocab_size": VOCAB, "output_bias": bias}
    head = LMHead(ModelConfig.build(settings)).to(dtype)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    return head


def some_labels(*shape: int, ignored: float = 0.3) -> Tensor:
    return torch.randint(VOCAB, shape).masked_fill(torch.rand(shape) < ignored, -100)


@given(st.integers(0, 9), st.floats(0, 0.9), st.floats(0, 1), st.integers(0, 999))
def test_lm_loss_equals_torch_with_smoothing_over_all_classes(
    rows: int, label_smoothing: float, ignored: float, seed: int
) -> None:
    torch.manual_seed(seed)
    head, labels = head_of(), some_labels(rows, 3, ignored=ignored)
    hidden = torch.randn(rows, 3, DIM, dtype=torch.float64)
    loss = lm_loss(hidden, head, labels, label_smoothing)
    logits, flat = head(hidden).flatten(0, 1), labels.flatten()
    expected = F.cross_entropy(logits, flat, reduction="sum", label_smoothing=label_smoothing * VOCAB / (VOCAB - 1))
    torch.testing.assert_close(loss.total, expected, **EXACT)
    torch.testing.assert_close(loss.unsmoothed, F.cross_entropy(logits, flat, reduction="sum"), **EXACT)
    assert loss.count == (labels != -100).sum()
    assert loss.correct == (logits.argmax(-1) == flat).sum()
    assert not loss.unsmoothed.requires_grad


def test_label_smoothing_puts_epsilon_on_the_other_tokens() -> None:
    head = head_of(bias=True)
    with torch.no_grad():
        head.proj.weight.zero_()
        assert head.proj.bias is not None
        head.proj.bias.copy_(torch.arange(VOCAB).double())
    logprobs = [logit - math.log(sum(math.exp(x) for x in range(VOCAB))) for logit in range(VOCAB)]
    label, epsilon = 4, 0.1
    others = sum(logprobs[token] for token in range(VOCAB) if token != label)
    by_hand = -(1 - epsilon) * logprobs[label] - epsilon / (VOCAB - 1) * others
    loss = lm_loss(torch.zeros(2, DIM).double(), head, torch.tensor([label, -100]), epsilon)
    assert loss.total.item() == pytest.approx(by_hand, rel=1e-12)
    assert loss.unsmoothed.item() == pytest.approx(-logprobs[label], rel=1e-12), "perplexity is without smoothing"
    assert (loss.count.item(), loss.correct.item()) == (1, 0)


def gradients(
    head: LMHead, hidden: Tensor, labels: Tensor, scale: float = 0.37, **options: float
) -> tuple[losses.Loss, dict[str, Tensor]]:
    """A loss and its gradients, for an incoming gradient other than 1."""
    hidden = hidden.clone().requires_grad_()
    head.zero_grad()
    loss = lm_loss(hidden, head, labels, **options)  # type: ignore[arg-type]
    (loss.total * scale).backward()
    assert hidden.grad is not None
    grads = {name: parameter.grad.clone() for name, parameter in head.named_parameters() if parameter.grad is not None}
    return loss, grads | {"hidden": hidden.grad}


@given(
    st.sampled_from(["decoder", "encoder"]),
    st.booleans(),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 999),
)
def test_chunked_loss_and_gradients_equal_unchunked(
    family: str, bias: bool, rows: int, label_smoothing: float, seed: int
) -> None:
    torch.manual_seed(seed)
    head, hidden = head_of(family, bias), torch.randn(2, 5, DIM, dtype=torch.float64)
    labels = some_labels(2, 5)
    full, expected = gradients(head, hidden, labels, label_smoothing=label_smoothing)
    max_bytes = 4 * VOCAB * rows
    chunked, grads = gradients(head, hidden, labels, label_smoothing=label_smoothing, max_bytes=max_bytes)
    for a, b in zip(chunked, full, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    assert grads.keys() == expected.keys()
    assert len(grads) == 2 + bias + 4 * (family == "encoder")  # hidden, weight, bias, and the transform
    for name in grads:
        torch.testing.assert_close(grads[name], expected[name], **EXACT, msg=name)


def test_logits_are_chunked_only_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = losses.cross_entropy
    monkeypatch.setattr(losses, "cross_entropy", lambda x, *rest: seen.append(len(x)) or original(x, *rest))
    head, hidden, labels = head_of(), torch.randn(10, DIM).double(), some_labels(10)
    row = 4 * VOCAB
    full = lm_loss(hidden, head, labels, max_bytes=10 * row)
    assert seen == [10]
    assert "ChunkedCrossEntropy" not in str(full.total.grad_fn)
    chunk = losses.cross_entropy_chunk
    monkeypatch.setattr(losses, "cross_entropy_chunk", lambda x, *rest: seen.append(len(x)) or chunk(x, *rest))
    lm_loss(hidden, head, labels, max_bytes=5 * row - 1)
    assert seen[1:] == [4, 4, 2]


def test_the_logits_of_a_chunk_are_freed_before_the_next() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def chunk_fn(*inputs: Any) -> losses.CrossEntropyChunk:
        assert all(logits() is None for logits in alive)
        chunk = losses.cross_entropy_chunk(*inputs)
        alive.append(weakref.ref(chunk.logits_grad))
        return chunk

    hidden = torch.randn(384, DIM).double().requires_grad_()
    lm_loss(hidden, head_of(), some_labels(384), max_bytes=0, chunk_fn=chunk_fn)
    assert len(alive) == 3


@pytest.mark.parametrize("limit", [0, 4 * VOCAB * 4, 1 << 30])
def test_argmax_tokens_chunked_or_not(limit: int) -> None:
    head, hidden = head_of("encoder"), torch.randn(2, 5, DIM).double()
    assert torch.equal(losses.argmax_tokens(hidden, head, limit), head(hidden).argmax(-1))


def test_only_masked_positions_go_through_the_head_of_a_masked_lm() -> None:
    head, seen = head_of("encoder"), []
    head.proj.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    labels = torch.full((3, 8), -100)
    labels[0, 2], labels[2, 5] = 4, 7
    hidden = torch.randn(3, 8, DIM).double().requires_grad_()
    loss = lm_loss(hidden, head, labels)
    loss.total.backward()
    assert seen == [2]
    assert loss.count == 2
    assert hidden.grad is not None
    assert (hidden.grad.abs().sum(-1) > 0).nonzero().tolist() == [[0, 2], [2, 5]]


@pytest.mark.parametrize("family", ["decoder", "encoder"])
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_a_batch_without_labels_has_zero_loss_and_gradients(family: str, limit: int) -> None:
    head, hidden = head_of(family), torch.randn(2, 3, DIM).double().requires_grad_()
    loss = lm_loss(hidden, head, torch.full((2, 3), -100), 0.1, max_bytes=limit)
    loss.total.backward()
    assert [value.item() for value in loss] == [0, 0, 0, 0]
    for parameter in head.parameters():  # present, as DDP expects, and 0
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_chunks_under_autocast_are_as_accurate_as_unchunked() -> None:
    """Hundreds of bf16 chunks: summed in bf16 too, the weight gradient would be off by a tenth."""
    head, hidden, labels = head_of(dtype=torch.float32), torch.randn(600, DIM), some_labels(600)
    _, exact = gradients(head, hidden, labels, label_smoothing=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        full_loss, full = gradients(head, hidden, labels, label_smoothing=0.1)
        chunked_loss, chunked = gradients(head, hidden, labels, label_smoothing=0.1, max_bytes=0)
    assert full_loss.total.dtype == chunked_loss.total.dtype == torch.float32
    torch.testing.assert_close(chunked_loss.total, full_loss.total, rtol=1e-5, atol=0)
    for name, grad in exact.items():
        chunked_error, full_error = ((g[name] - grad).norm() / grad.norm() for g in (chunked, full))
        assert chunked[name].dtype == torch.float32
        assert chunked_error < 1.2 * full_error < 0.01, (name, chunked_error, full_error)


def test_chunks_give_the_same_gradient_again_and_refuse_a_second_derivative() -> None:
    head, hidden, labels = head_of(), torch.randn(9, DIM).double(), some_labels(9)
    total = lm_loss(hidden, head, labels, max_bytes=0).total
    first, second = (torch.autograd.grad(total, head.proj.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    seed = torch.ones_like(total, requires_grad=True)
    (gradient,) = torch.autograd.grad(total, head.proj.weight, seed, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):  # not a wrong second derivative
        gradient.sum().backward()


def test_a_tied_embedding_gets_both_gradients() -> None:
    network = build(preset("tiny-gpt", ["vocab_size=50", "dim=16", "ff_dim=16"])).double().eval()
    assert network.heads.lm_head is not None
    assert network.heads.lm_head.proj.weight is network.decoder.embedding.tokens.weight
    ids, labels, grads = torch.randint(50, (2, 7)), torch.randint(50, (2, 7)), []
    for limit in (1 << 30, 4 * 50 * 3):
        network.zero_grad()
        lm_loss(network.decode(ids), network.heads.lm_head, labels, max_bytes=limit).total.backward()  # type: ignore[operator]
        grads.append({name: parameter.grad for name, parameter in network.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name in grads[0]:
        torch.testing.assert_close(grads[1][name], grads[0][name], **EXACT)


def test_chunks_compute_no_gradients_under_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a gradient was computed")

    head, hidden, labels = head_of(), torch.randn(10, DIM).double(), some_labels(10)
    expected = lm_loss(hidden, head, labels)
    monkeypatch.setattr(torch.autograd, "grad", refuse)
    with torch.no_grad():
        loss = lm_loss(hidden, head, labels, max_bytes=4 * VOCAB * 3)
    torch.testing.assert_close(loss.total, expected.total.detach(), **EXACT)
    head.requires_grad_(False)
    assert not lm_loss(hidden, head, labels, max_bytes=0).total.requires_grad


def test_a_frozen_head_gets_no_gradient_but_hidden_states_do() -> None:
    head, hidden, labels = head_of(), torch.randn(10, DIM).double(), some_labels(10)
    expected = gradients(head, hidden, labels)[1]["hidden"]
    head.requires_grad_(False)
    head.proj.weight.grad = head.proj.bias.grad = None
    grads = gradients(head, hidden, labels, max_bytes=4 * VOCAB)[1]
    assert grads.keys() == {"hidden"}
    torch.testing.assert_close(grads["hidden"], expected, **EXACT)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_unequal_micro_batches_give_the_gradient_of_the_full_batch(limit: int) -> None:
    head, hidden = head_of(), torch.randn(6, 4, DIM).double()
    labels = some_labels(6, 4)
    labels[:2, 1:] = -100  # the first micro-batch has far fewer labels
    assert (labels[:2] != -100).sum() < (labels[2:] != -100).sum()
    full = lm_loss(hidden, head, labels, 0.1)
    expected = torch.autograd.grad(full.total / full.count, head.proj.weight)[0]
    micro = [lm_loss(hidden[rows], head, labels[rows], 0.1, max_bytes=limit) for rows in (slice(2), slice(2, 6))]
    count = sum(loss.count for loss in micro)
    for loss in micro:
        (loss.total / count).backward()
    assert head.proj.weight.grad is not None
    torch.testing.assert_close(head.proj.weight.grad, expected, **EXACT)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_no_loss_syncs_the_device(limit: int) -> None:
    """The meta device has no values: reading one is an error."""
    head = head_of().to("meta")
    x, labels = torch.randn(4, 5, DIM, device="meta", dtype=torch.float64), torch.zeros(4, 5).long().to("meta")
    lm_loss(x.requires_grad_(), head, labels, 0.1, max_bytes=limit).total.backward()
    losses.argmax_tokens(x, head)
    class_loss(x, labels, x[0, 0].detach()).total.backward()
    row = labels[:, 0]
    span_loss(x[..., :2], row, row, row).total.backward()
    cosine_loss(x[:, 0], x[:, 1], row.double()).total.backward()
    contrastive_loss(x[:, 0], x[:, 1]).total.backward()


def test_lm_loss_compiles_to_one_graph() -> None:
    code = """
import torch
from tests.train.test_losses import head_of, some_labels, lm_loss, DIM
head, hidden, labels = head_of(), torch.randn(2, 5, DIM).double(), some_labels(2, 5)
compiled = torch.compile(lm_loss, fullgraph=True, backend="aot_eager")(hidden, head, labels, 0.1)
both = (compiled, lm_loss(hidden, head, labels, 0.1))
grads = [torch.autograd.grad(loss.total, head.proj.weight)[0] for loss in both]
torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
chunked = torch.compile(lm_loss, backend="eager")(hidden, head, labels, 0.1, max_bytes=0)  # graph breaks allowed
torch.testing.assert_close(chunked.total, compiled.total, rtol=1e-12, atol=1e-12)
"""
    env = os.environ | {"TORCHDYNAMO_DISABLE": "0", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_class_tag_and_next_sentence_loss_are_the_same_function() -> None:
    assert tag_loss is class_loss
    assert next_sentence_loss is class_loss
    logits, labels = torch.randn(3, 4, 5).double(), torch.randint(5, (3, 4))
    labels[1, 2:] = -100
    loss = class_loss(logits, labels)
    torch.testing.assert_close(loss.total, F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum"), **EXACT)
    assert loss.count == 10
    assert loss.correct == (logits.argmax(-1) == labels).sum()


def test_class_weights_scale_each_item_but_not_the_count() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [5.0, 5.0]], dtype=torch.float64)
    loss = class_loss(logits, torch.tensor([0, 1, -100]), torch.tensor([10.0, 2.0]))
    assert loss.total.item() == pytest.approx(10 * math.log(4) + 2 * math.log(4 / 3), rel=1e-12)
    assert loss.unsmoothed.item() == pytest.approx(math.log(4) + math.log(4 / 3), rel=1e-12)
    assert (loss.count, loss.correct) == (2, 1)


def test_span_loss_masks_padding() -> None:
    logits = torch.zeros(3, 5, 2).double()
    logits[0, 2, 0], logits[0, 4] = 1.0, 50.0  # row 0 has 4 tokens: the large logits after them are masked
    logits.requires_grad_()
    first, last = torch.tensor([2, 0, -100]), torch.tensor([3, 0, -100])
    loss = span_loss(logits, first, last, torch.tensor([4, 3, 5]))
    by_hand = (math.log(3 + math.e) - 1 + math.log(4)) / 2 + math.log(3)
    assert loss.total.item() == pytest.approx(by_hand, rel=1e-12)
    assert (loss.count, loss.correct) == (2, 1), (
        "row 1 has no answer and predicts 0; row 0's end is a tie, counted as wrong"
    )
    loss.total.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[0, 4:].any()
    assert not logits.grad[1, 3:].any()
    assert not logits.grad[2].any()


def test_a_span_is_correct_when_both_ends_are() -> None:
    logits = F.one_hot(torch.tensor([[1, 2], [1, 2], [1, 2]]), 4).transpose(1, 2).double()  # predicts 1 to 2
    loss = span_loss(logits, torch.tensor([1, 1, 0]), torch.tensor([2, 3, 2]), torch.tensor([4, 4, 4]))
    assert loss.correct == 1


def test_regression_loss_is_the_squared_error() -> None:
    values = torch.tensor([1.0, 2.0, 5.0])
    for predictions in (torch.tensor([1.5, 2.0, 3.0]), torch.tensor([[1.5], [2.0], [3.0]])):
        loss = regression_loss(predictions, values)
        assert [value.item() for value in loss] == [4.25, 3, 4.25, 0]


def test_cosine_loss_ignores_lengths() -> None:
    a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]).double()
    b = torch.tensor([[5.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double()
    loss = cosine_loss(a, b, torch.tensor([1.0, 0.25, 0.0]))
    assert loss.total.item() == pytest.approx(0 + 0.25**2 + 0.5, rel=1e-12)
    assert loss.count == 3


def test_contrastive_loss_is_symmetric_cross_entropy() -> None:
    a = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double()
    b = torch.tensor([[1.0, 0.0], [3.0, 0.0]]).double()  # row 1 of b does not match row 1 of a
    loss = contrastive_loss(a, b, temperature=0.5)
    # cosines: (1, 1), (0, 0); over 0.5: (2, 2), (0, 0)
    a_to_b = 2 * math.log(2)
    b_to_a = math.log(math.exp(2) + 1) - 2 + math.log(math.exp(2) + 1)
    assert loss.total.item() == pytest.approx((a_to_b + b_to_a) / 2, rel=1e-12)
    assert loss.count == 2
    perfect = contrastive_loss(torch.eye(4).double(), torch.eye(4).double())
    assert perfect.correct == 4
    assert perfect.total < 1e-6


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_half_precision_losses_are_summed_in_fp32(limit: int) -> None:
    head, hidden, labels = head_of(dtype=torch.bfloat16), torch.randn(500, DIM).bfloat16(), some_labels(500)
    expected = F.cross_entropy(head(hidden).float(), labels, reduction="sum")
    loss = lm_loss(hidden, head, labels, max_bytes=limit)
    loss.total.backward()
    assert head.proj.weight.grad is not None
    assert head.proj.weight.grad.dtype == torch.bfloat16
    for each in (loss, class_loss(head(hidden), labels)):
        assert each.total.dtype == torch.float32
        torch.testing.assert_close(each.total, expected, rtol=1e-5, atol=0)
