"""Losses against torch's own and numbers worked out by hand; pieces against the whole, gradients included."""

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
    next_sentence,
    regression_loss,
    span_loss,
    tag_loss,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}
WORDS, WIDTH = 11, 6


def head_of(family: str = "decoder", bias: bool = True, dtype: torch.dtype = torch.float64) -> LMHead:
    """A word head with random weights; an encoder's has a layer before the scores."""
    layers = {"decoder": "decoder_layers", "encoder": "encoder_layers"}[family]
    settings = {"family": family, layers: 1, "dim": WIDTH, "heads": 1, "vocab_size": WORDS, "output_bias": bias}
    head = LMHead(ModelConfig.build(settings)).to(dtype)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    return head


def some_labels(*shape: int, ignored: float = 0.3) -> Tensor:
    return torch.randint(WORDS, shape).masked_fill(torch.rand(shape) < ignored, -100)


@given(st.integers(0, 9), st.floats(0, 0.9), st.floats(0, 1), st.integers(0, 999))
def test_words_equal_torch_with_smoothing_over_all_classes(
    rows: int, smoothing: float, ignored: float, seed: int
) -> None:
    torch.manual_seed(seed)
    head, labels = head_of(), some_labels(rows, 3, ignored=ignored)
    hidden = torch.randn(rows, 3, WIDTH, dtype=torch.float64)
    loss = lm_loss(hidden, head, labels, smoothing)
    scores, flat = head(hidden).flatten(0, 1), labels.flatten()
    expected = F.cross_entropy(scores, flat, reduction="sum", label_smoothing=smoothing * WORDS / (WORDS - 1))
    torch.testing.assert_close(loss.total, expected, **EXACT)
    torch.testing.assert_close(loss.unsmoothed, F.cross_entropy(scores, flat, reduction="sum"), **EXACT)
    assert loss.count == (labels != -100).sum()
    assert loss.correct == (scores.argmax(-1) == flat).sum()
    assert not loss.unsmoothed.requires_grad


def test_smoothing_leaves_the_right_word_the_rest_of_what_it_gives_away() -> None:
    head = head_of(bias=True)
    with torch.no_grad():
        head.proj.weight.zero_()
        assert head.proj.bias is not None
        head.proj.bias.copy_(torch.arange(WORDS).double())
    log_p = [score - math.log(sum(math.exp(s) for s in range(WORDS))) for score in range(WORDS)]
    right, epsilon = 4, 0.1
    others = sum(log_p[word] for word in range(WORDS) if word != right)
    by_hand = -(1 - epsilon) * log_p[right] - epsilon / (WORDS - 1) * others
    loss = lm_loss(torch.zeros(2, WIDTH).double(), head, torch.tensor([right, -100]), epsilon)
    assert loss.total.item() == pytest.approx(by_hand, rel=1e-12)
    assert loss.unsmoothed.item() == pytest.approx(-log_p[right], rel=1e-12), "perplexity knows nothing of smoothing"
    assert (loss.count.item(), loss.correct.item()) == (1, 0)


def gradients(
    head: LMHead, hidden: Tensor, labels: Tensor, scale: float = 0.37, **options: float
) -> tuple[losses.Loss, dict[str, Tensor]]:
    """A loss and the gradients of everything behind it, for an incoming gradient that is not 1."""
    hidden = hidden.clone().requires_grad_()
    head.zero_grad()
    loss = lm_loss(hidden, head, labels, **options)  # type: ignore[arg-type]
    (loss.total * scale).backward()
    assert hidden.grad is not None
    found = {name: parameter.grad.clone() for name, parameter in head.named_parameters() if parameter.grad is not None}
    return loss, found | {"hidden": hidden.grad}


@given(
    st.sampled_from(["decoder", "encoder"]),
    st.booleans(),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 999),
)
def test_pieces_equal_the_whole_with_all_gradients(
    family: str, bias: bool, rows: int, smoothing: float, seed: int
) -> None:
    torch.manual_seed(seed)
    head, hidden = head_of(family, bias), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    labels = some_labels(2, 5)
    whole, expected = gradients(head, hidden, labels, smoothing=smoothing)
    parts, found = gradients(head, hidden, labels, smoothing=smoothing, limit=4 * WORDS * rows)
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    assert found.keys() == expected.keys()
    assert len(found) == 2 + bias + 4 * (family == "encoder")  # hidden, matrix, bias, and the layer before
    for name in found:
        torch.testing.assert_close(found[name], expected[name], **EXACT, msg=name)


def test_pieces_are_made_only_above_the_limit_and_stay_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = losses.cross_entropy
    monkeypatch.setattr(losses, "cross_entropy", lambda scores, *rest: seen.append(len(scores)) or real(scores, *rest))
    head, hidden, labels = head_of(), torch.randn(10, WIDTH).double(), some_labels(10)
    row = 4 * WORDS
    whole = lm_loss(hidden, head, labels, limit=10 * row)
    assert seen == [10]
    assert "ChunkedCrossEntropy" not in str(whole.total.grad_fn)
    whole_piece = losses.cross_entropy_chunk
    monkeypatch.setattr(losses, "piece", lambda x, *rest: seen.append(len(x)) or whole_piece(x, *rest))
    lm_loss(hidden, head, labels, limit=5 * row - 1)
    assert seen[1:] == [4, 4, 2]


def test_the_scores_of_one_piece_are_gone_when_the_next_are_made() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def work(*inputs: Any) -> losses.Chunk:
        assert all(scores() is None for scores in alive)
        found = losses.cross_entropy_chunk(*inputs)
        alive.append(weakref.ref(found.scores))
        return found

    hidden = torch.randn(384, WIDTH).double().requires_grad_()
    lm_loss(hidden, head_of(), some_labels(384), limit=0, compiled=work)
    assert len(alive) == 3


@pytest.mark.parametrize("limit", [0, 4 * WORDS * 4, 1 << 30])
def test_best_words_are_the_highest_scores_in_pieces_or_not(limit: int) -> None:
    head, hidden = head_of("encoder"), torch.randn(2, 5, WIDTH).double()
    assert torch.equal(losses.argmax_tokens(hidden, head, limit), head(hidden).argmax(-1))


def test_only_masked_words_go_through_a_masked_models_head() -> None:
    head, seen = head_of("encoder"), []
    head.proj.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    labels = torch.full((3, 8), -100)
    labels[0, 2], labels[2, 5] = 4, 7
    hidden = torch.randn(3, 8, WIDTH).double().requires_grad_()
    loss = lm_loss(hidden, head, labels)
    loss.total.backward()
    assert seen == [2]
    assert loss.count == 2
    assert hidden.grad is not None
    assert (hidden.grad.abs().sum(-1) > 0).nonzero().tolist() == [[0, 2], [2, 5]]


@pytest.mark.parametrize("family", ["decoder", "encoder"])
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_a_batch_in_which_nothing_counts_costs_nothing(family: str, limit: int) -> None:
    head, hidden = head_of(family), torch.randn(2, 3, WIDTH).double().requires_grad_()
    loss = lm_loss(hidden, head, torch.full((2, 3), -100), 0.1, limit=limit)
    loss.total.backward()
    assert [value.item() for value in loss] == [0, 0, 0, 0]
    for parameter in head.parameters():  # present, as every process of a parallel run expects, and 0
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_pieces_under_autocast_are_as_close_to_the_truth_as_the_whole() -> None:
    """Hundreds of pieces in bf16: added up in bf16 too, the gradient of the matrix would be off by a tenth."""
    head, hidden, labels = head_of(dtype=torch.float32), torch.randn(600, WIDTH), some_labels(600)
    _, truth = gradients(head, hidden, labels, smoothing=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss, whole = gradients(head, hidden, labels, smoothing=0.1)
        pieces, found = gradients(head, hidden, labels, smoothing=0.1, limit=0)
    assert loss.total.dtype == pieces.total.dtype == torch.float32
    torch.testing.assert_close(pieces.total, loss.total, rtol=1e-5, atol=0)
    for name, exact in truth.items():
        off, also = ((g[name] - exact).norm() / exact.norm() for g in (found, whole))
        assert found[name].dtype == torch.float32
        assert off < 1.2 * also < 0.01, (name, off, also)


def test_pieces_give_the_same_gradient_again_and_refuse_a_second_derivative() -> None:
    head, hidden, labels = head_of(), torch.randn(9, WIDTH).double(), some_labels(9)
    total = lm_loss(hidden, head, labels, limit=0).total
    first, second = (torch.autograd.grad(total, head.proj.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    seed = torch.ones_like(total, requires_grad=True)
    (gradient,) = torch.autograd.grad(total, head.proj.weight, seed, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):  # rather than a second derivative that is wrong
        gradient.sum().backward()


def test_a_matrix_tied_with_the_embedding_gets_both_gradients() -> None:
    network = build(preset("tiny-gpt", ["vocab_size=50", "dim=16", "ff_dim=16"])).double().eval()
    assert network.heads.lm_head is not None
    assert network.heads.lm_head.proj.weight is network.decoder.embedding.tokens.weight
    ids, labels, found = torch.randint(50, (2, 7)), torch.randint(50, (2, 7)), []
    for limit in (1 << 30, 4 * 50 * 3):
        network.zero_grad()
        lm_loss(network.decode(ids), network.heads.lm_head, labels, limit=limit).total.backward()  # type: ignore[operator]
        found.append({name: parameter.grad for name, parameter in network.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], **EXACT)


def test_pieces_make_no_gradients_where_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a gradient was made")

    head, hidden, labels = head_of(), torch.randn(10, WIDTH).double(), some_labels(10)
    expected = lm_loss(hidden, head, labels)
    monkeypatch.setattr(torch.autograd, "grad", refuse)
    with torch.no_grad():
        found = lm_loss(hidden, head, labels, limit=4 * WORDS * 3)
    torch.testing.assert_close(found.total, expected.total.detach(), **EXACT)
    head.requires_grad_(False)
    assert not lm_loss(hidden, head, labels, limit=0).total.requires_grad


def test_a_frozen_matrix_gets_no_gradient_but_hidden_states_do() -> None:
    head, hidden, labels = head_of(), torch.randn(10, WIDTH).double(), some_labels(10)
    expected = gradients(head, hidden, labels)[1]["hidden"]
    head.requires_grad_(False)
    head.proj.weight.grad = head.proj.bias.grad = None
    found = gradients(head, hidden, labels, limit=4 * WORDS)[1]
    assert found.keys() == {"hidden"}
    torch.testing.assert_close(found["hidden"], expected, **EXACT)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_unequal_parts_of_a_batch_give_the_update_of_the_whole(limit: int) -> None:
    head, hidden = head_of(), torch.randn(6, 4, WIDTH).double()
    labels = some_labels(6, 4)
    labels[:2, 1:] = -100  # the first part counts far fewer words
    assert (labels[:2] != -100).sum() < (labels[2:] != -100).sum()
    whole = lm_loss(hidden, head, labels, 0.1)
    expected = torch.autograd.grad(whole.total / whole.count, head.proj.weight)[0]
    parts = [lm_loss(hidden[rows], head, labels[rows], 0.1, limit=limit) for rows in (slice(2), slice(2, 6))]
    count = sum(part.count for part in parts)
    for part in parts:
        (part.total / count).backward()
    assert head.proj.weight.grad is not None
    torch.testing.assert_close(head.proj.weight.grad, expected, **EXACT)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_no_loss_waits_for_the_device(limit: int) -> None:
    """On the meta device there are shapes and no numbers: asking for one is an error."""
    head = head_of().to("meta")
    x, labels = torch.randn(4, 5, WIDTH, device="meta", dtype=torch.float64), torch.zeros(4, 5).long().to("meta")
    lm_loss(x.requires_grad_(), head, labels, 0.1, limit=limit).total.backward()
    losses.argmax_tokens(x, head)
    class_loss(x, labels, x[0, 0].detach()).total.backward()
    row = labels[:, 0]
    span_loss(x[..., :2], row, row, row).total.backward()
    cosine_loss(x[:, 0], x[:, 1], row.double()).total.backward()
    contrastive_loss(x[:, 0], x[:, 1]).total.backward()


def test_words_compile_in_one_piece() -> None:
    code = """
import torch
from tests.train.test_losses import head_of, some_labels, word_loss, WIDTH
head, hidden, labels = head_of(), torch.randn(2, 5, WIDTH).double(), some_labels(2, 5)
compiled = torch.compile(word_loss, fullgraph=True, backend="aot_eager")(hidden, head, labels, 0.1)
both = (compiled, word_loss(hidden, head, labels, 0.1))
grads = [torch.autograd.grad(loss.total, head.scores.weight)[0] for loss in both]
torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
pieces = torch.compile(word_loss, backend="eager")(hidden, head, labels, 0.1, limit=0)  # may fall out of the graph
torch.testing.assert_close(pieces.total, compiled.total, rtol=1e-12, atol=1e-12)
"""
    env = os.environ | {"TORCHDYNAMO_DISABLE": "0", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_classes_tags_and_next_sentence_are_one_loss() -> None:
    assert tag_loss is class_loss
    assert next_sentence is class_loss
    scores, labels = torch.randn(3, 4, 5).double(), torch.randint(5, (3, 4))
    labels[1, 2:] = -100
    loss = class_loss(scores, labels)
    torch.testing.assert_close(loss.total, F.cross_entropy(scores.transpose(1, 2), labels, reduction="sum"), **EXACT)
    assert loss.count == 10
    assert loss.correct == (scores.argmax(-1) == labels).sum()


def test_class_weights_scale_each_item_and_leave_the_count() -> None:
    scores = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [5.0, 5.0]], dtype=torch.float64)
    loss = class_loss(scores, torch.tensor([0, 1, -100]), torch.tensor([10.0, 2.0]))
    assert loss.total.item() == pytest.approx(10 * math.log(4) + 2 * math.log(4 / 3), rel=1e-12)
    assert loss.unsmoothed.item() == pytest.approx(math.log(4) + math.log(4 / 3), rel=1e-12)
    assert (loss.count, loss.correct) == (2, 1)


def test_spans_never_point_at_padding() -> None:
    scores = torch.zeros(3, 5, 2).double()
    scores[0, 2, 0], scores[0, 4] = 1.0, 50.0  # row 0 has 4 tokens: what stands behind them is huge and hidden
    scores.requires_grad_()
    first, last = torch.tensor([2, 0, -100]), torch.tensor([3, 0, -100])
    loss = span_loss(scores, first, last, torch.tensor([4, 3, 5]))
    by_hand = (math.log(3 + math.e) - 1 + math.log(4)) / 2 + math.log(3)
    assert loss.total.item() == pytest.approx(by_hand, rel=1e-12)
    assert (loss.count, loss.correct) == (2, 1), "row 1, without an answer, points at 0; row 0's end is a tie, lost"
    loss.total.backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert not scores.grad[0, 4:].any()
    assert not scores.grad[1, 3:].any()
    assert not scores.grad[2].any()


def test_a_span_is_right_when_both_ends_are() -> None:
    scores = F.one_hot(torch.tensor([[1, 2], [1, 2], [1, 2]]), 4).transpose(1, 2).double()  # points at 1 to 2
    loss = span_loss(scores, torch.tensor([1, 1, 0]), torch.tensor([2, 3, 2]), torch.tensor([4, 4, 4]))
    assert loss.correct == 1


def test_numbers_are_compared_by_squared_error() -> None:
    values = torch.tensor([1.0, 2.0, 5.0])
    for scores in (torch.tensor([1.5, 2.0, 3.0]), torch.tensor([[1.5], [2.0], [3.0]])):
        loss = regression_loss(scores, values)
        assert [value.item() for value in loss] == [4.25, 3, 4.25, 0]


def test_cosine_loss_knows_directions_alone() -> None:
    a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]).double()
    b = torch.tensor([[5.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double()
    loss = cosine_loss(a, b, torch.tensor([1.0, 0.25, 0.0]))
    assert loss.total.item() == pytest.approx(0 + 0.25**2 + 0.5, rel=1e-12)
    assert loss.count == 3


def test_contrastive_loss_finds_the_pair_both_ways() -> None:
    a = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double()
    b = torch.tensor([[1.0, 0.0], [3.0, 0.0]]).double()  # row 1 of b is no match for row 1 of a
    loss = contrastive_loss(a, b, temperature=0.5)
    # cosines: (1, 1), (0, 0); over 0.5: (2, 2), (0, 0)
    there = 2 * math.log(2)
    back = math.log(math.exp(2) + 1) - 2 + math.log(math.exp(2) + 1)
    assert loss.total.item() == pytest.approx((there + back) / 2, rel=1e-12)
    assert loss.count == 2
    perfect = contrastive_loss(torch.eye(4).double(), torch.eye(4).double())
    assert perfect.correct == 4
    assert perfect.total < 1e-6


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_half_precision_scores_are_summed_in_fp32(limit: int) -> None:
    head, hidden, labels = head_of(dtype=torch.bfloat16), torch.randn(500, WIDTH).bfloat16(), some_labels(500)
    expected = F.cross_entropy(head(hidden).float(), labels, reduction="sum")
    loss = lm_loss(hidden, head, labels, limit=limit)
    loss.total.backward()
    assert head.proj.weight.grad is not None
    assert head.proj.weight.grad.dtype == torch.bfloat16
    for found in (loss, class_loss(head(hidden), labels)):
        assert found.total.dtype == torch.float32
        torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=0)
