"""Scheduled sampling and exposure bias against slow loops written out, and models whose answers are known."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.model import Documents, EncoderDecoder, EncoderOutput
from clearhead.train.exposure_bias import exposure_bias
from clearhead.train.losses import lm_loss
from clearhead.train.scheduled_sampling import Decay, probability, scheduled_inputs
from tests.strategies import VOCABULARY, configs, network_of, tokens

TRANSLATOR = ("encoder-decoder",)


@pytest.mark.parametrize(
    ("decay", "step", "expected"),
    [
        ("linear", 0, 0),
        ("linear", 30, 0.3),
        ("linear", 100, 0.9),  # the floor keeps a tenth of the true words
        ("exponential", 0, 0),
        ("exponential", 100, 1 - 1 / math.e),
        ("exponential", 10_000, 0.9),
        ("inverse-sigmoid", 0, 1 / 101),
        ("inverse-sigmoid", 100, math.e / (100 + math.e)),
        ("inverse-sigmoid", 461, 0.501207),  # half way at pace · ln(pace)
        ("inverse-sigmoid", 10**9, 0.9),
    ],
)
def test_true_words_decay_as_in_the_article(decay: Decay, step: int, expected: float) -> None:
    assert probability(decay, step, pace=100, floor=0.1) == pytest.approx(expected, abs=1e-5)


def translator(config: ModelConfig, **changes: float) -> EncoderDecoder:
    network = network_of(config.model_copy(update=changes))
    assert isinstance(network, EncoderDecoder)
    return network


def mix(network: EncoderDecoder, lengths: list[int], share: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A batch's source and target, and the mixed target."""
    source, target = tokens(len(lengths), 6), tokens(len(lengths), max(lengths) + 1)
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([6, 3, 4, 5][: len(lengths)])
    return source, target, scheduled_inputs(network, source, target, sizes, torch.tensor(lengths), share, generator)


@given(configs(TRANSLATOR), st.lists(st.integers(1, 8), min_size=1, max_size=4), st.sampled_from([0.0, 0.4, 1.0]))
def test_mixed_inputs_equal_a_loop_over_every_token(config: ModelConfig, lengths: list[int], share: float) -> None:
    network = translator(config)
    source, target, mixed = mix(network, lengths, share, seed=5)
    draws = torch.rand(target.shape, generator=torch.Generator().manual_seed(5))
    for row, length in enumerate(lengths):
        size = [6, 3, 4, 5][row]
        for t in range(target.shape[1]):
            expected = target[row, t]
            if 0 < t < length and draws[row, t] < share:
                scores = network(source[row : row + 1, :size], target[row : row + 1, :t])[0, -1]
                expected = scores.argmax()
            assert mixed[row, t] == expected


@given(configs(TRANSLATOR), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_packed_documents_keep_their_beginnings(config: ModelConfig, lengths: list[int]) -> None:
    network = translator(config)
    rows, sizes = [tokens(1, length) for length in lengths], [length % 3 + 1 for length in lengths]
    sources = [tokens(1, size) for size in sizes]
    packed = scheduled_inputs(
        network,
        torch.cat(sources, 1),
        torch.cat(rows, 1),
        None,
        None,
        1.0,
        torch.Generator(),
        source_documents=Documents.of(sizes),
        target_documents=Documents.of(lengths),
    )
    alone = [
        scheduled_inputs(network, source, row, None, None, 1.0, torch.Generator())
        for source, row in zip(sources, rows, strict=True)
    ]
    assert torch.equal(packed, torch.cat(alone, 1))
    assert [row[0, 0] for row in alone] == [row[0, 0] for row in rows]


@given(configs(TRANSLATOR, norms=("layer", "rms")))
def test_without_replacement_it_is_teacher_forcing(config: ModelConfig) -> None:
    _, target, mixed = mix(translator(config), [5, 2, 7], 0.0)
    assert torch.equal(mixed, target)


@given(configs(TRANSLATOR, norms=("layer", "rms")), st.integers(0, 99))
def test_draws_depend_on_the_generator_alone(config: ModelConfig, seed: int) -> None:
    network = translator(config)
    source, target = tokens(2, 6), tokens(2, 9)
    sizes, lengths = torch.tensor([6, 4]), torch.tensor([9, 8])

    def once(number: int) -> Tensor:
        return scheduled_inputs(network, source, target, sizes, lengths, 0.5, torch.Generator().manual_seed(number))

    first = once(seed)
    torch.rand(3)  # what else is drawn makes no difference
    assert torch.equal(once(seed), first)


def tiny() -> EncoderDecoder:
    torch.manual_seed(1)
    settings = {"family": "encoder-decoder", "encoder_layers": 1, "decoder_layers": 1, "dim": 8, "heads": 2}
    return translator(ModelConfig.build(settings | {"vocab_size": VOCABULARY, "tie": "all"}))


def test_the_gradient_flows_through_the_second_pass_alone() -> None:
    network = tiny().train()
    head = network.heads.lm_head
    assert head is not None
    source, target, mixed = mix(network, [5, 3], 1.0)
    assert not mixed.requires_grad
    assert all(parameter.grad is None for parameter in network.parameters())
    assert network.training
    labels = tokens(2, target.shape[1])

    def gradient(inputs: Tensor) -> Tensor:
        network.zero_grad()
        lm_loss(network.decode(inputs, network.encode(source)), head, labels).total.backward()
        assert head.proj.weight.grad is not None
        return head.proj.weight.grad.clone()

    as_given = mixed.detach().clone()
    assert torch.equal(gradient(mixed), gradient(as_given)), "as if the mixed words had been the data"
    assert not torch.equal(gradient(mixed), gradient(target))


def test_the_first_pass_has_dropout_when_the_network_trains() -> None:
    network = translator(tiny().config, dropout=0.9)
    source, target, lengths = tokens(4, 6), tokens(4, 12), torch.full((4,), 12)

    def once() -> Tensor:
        return scheduled_inputs(network, source, target, None, lengths, 1.0, torch.Generator())

    assert torch.equal(once(), once())
    network.train()
    assert not torch.equal(once(), once())
    assert network.training


BEGIN, END = 1, 2


class Counting(EncoderDecoder):
    """Answers n + 1 to n, but 7 to 5: one slip of the pen, after which nothing in the true text is met again."""

    def encode(self, source: Tensor, lengths: Tensor | None = None, **_: object) -> EncoderOutput:
        return EncoderOutput(source)

    def decode(self, target: Tensor, *_: object, **__: object) -> Tensor:  # type: ignore[override]
        assert not self.training
        return torch.where(target == 5, 7, target + 1)

    def words(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden, 40).double()


def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    network = Counting(tiny().config)
    monkeypatch.setattr("clearhead.train.exposure_bias.best_words", lambda hidden, _: hidden)
    return network.train()


def test_one_slip_costs_all_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    network = counting(monkeypatch)
    target = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 0, 0, 0]])
    found = exposure_bias(network, tokens(2, 3), torch.tensor([3, 3]), target, torch.tensor([7, 4]), end=39)
    assert found.count.tolist() == [2, 2, 2, 1, 1, 1]
    assert found.forced.tolist() == [2, 2, 1, 1, 1, 1], "reading the truth, it slips once, at 5"
    assert found.free.tolist() == [2, 2, 1, 0, 0, 0], "reading itself, it never comes back"
    assert found.bias.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.mean.item() == pytest.approx(3 / 9)
    assert network.training


def test_a_row_that_has_ended_has_no_more_words(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.tensor([[10, 11, 12, 13, 14]])
    found = exposure_bias(counting(monkeypatch), tokens(1, 3), torch.tensor([3]), target, torch.tensor([5]), end=12)
    assert found.forced.tolist() == [1, 1, 1, 1]
    assert found.free.tolist() == [1, 1, 0, 0], "the end itself is still a word"


def test_batches_of_unequal_length_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    network = counting(monkeypatch)
    rows = [torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[10, 11, 12]])]
    parts = [exposure_bias(network, tokens(1, 3), torch.tensor([3]), r, torch.tensor([r.shape[1]]), 39) for r in rows]
    for both in (parts[0] + parts[1], parts[1] + parts[0]):
        assert both.count.tolist() == [2, 2, 1, 1]
        assert both.forced.tolist() == [2, 2, 0, 1]
        assert both.free.tolist() == [2, 2, 0, 0]


@given(configs(TRANSLATOR), st.lists(st.integers(2, 8), min_size=1, max_size=4))
def test_exposure_of_a_real_network_equals_a_loop_without_cache(config: ModelConfig, lengths: list[int]) -> None:
    network = translator(config).train()
    source, target = tokens(len(lengths), 5), tokens(len(lengths), max(lengths))
    sizes = torch.tensor([5, 2, 4, 3][: len(lengths)])
    found = exposure_bias(network, source, sizes, target, torch.tensor(lengths), END)
    assert network.training
    network.eval()
    forced, free = torch.zeros(max(lengths) - 1), torch.zeros(max(lengths) - 1)
    for row, length in enumerate(lengths):
        given_source, written, ended = source[row : row + 1, : sizes[row]], target[row : row + 1, :1], False
        for t in range(length - 1):
            true = target[row, t + 1]
            forced[t] += network(given_source, target[row : row + 1, : t + 1])[0, -1].argmax() == true
            word = network(given_source, written)[0, -1].argmax()
            free[t] += (word == true) & (not ended)
            ended = ended or bool(word == END)
            written = torch.cat([written, word.reshape(1, 1)], dim=1)
    assert found.forced.tolist() == forced.tolist()
    assert found.free.tolist() == free.tolist()
    assert found.bias[0] == 0, "the first word follows the same token either way"
