"""Scheduled sampling and exposure bias against plain loops, and models with known outputs."""

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
from clearhead.train.scheduled_sampling import Decay, sampling_prob, scheduled_inputs
from tests.strategies import VOCABULARY, configs, network_of, tokens

TRANSLATOR = ("encoder-decoder",)


@pytest.mark.parametrize(
    ("decay", "step", "expected"),
    [
        ("linear", 0, 0),
        ("linear", 30, 0.3),
        ("linear", 100, 0.9),  # min_prob keeps a tenth of the targets
        ("exponential", 0, 0),
        ("exponential", 100, 1 - 1 / math.e),
        ("exponential", 10_000, 0.9),
        ("inverse-sigmoid", 0, 1 / 101),
        ("inverse-sigmoid", 100, math.e / (100 + math.e)),
        ("inverse-sigmoid", 461, 0.501207),  # half way at k · ln(k)
        ("inverse-sigmoid", 10**9, 0.9),
    ],
)
def test_the_teacher_forcing_ratio_decays_as_in_the_article(decay: Decay, step: int, expected: float) -> None:
    assert sampling_prob(decay, step, decay_steps=100, min_prob=0.1) == pytest.approx(expected, abs=1e-5)


def translator(config: ModelConfig, **changes: float) -> EncoderDecoder:
    network = network_of(config.model_copy(update=changes))
    assert isinstance(network, EncoderDecoder)
    return network


def mix(network: EncoderDecoder, lengths: list[int], prob: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A batch's source and target, and the mixed target."""
    source, target = tokens(len(lengths), 6), tokens(len(lengths), max(lengths) + 1)
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([6, 3, 4, 5][: len(lengths)])
    return source, target, scheduled_inputs(network, source, target, sizes, torch.tensor(lengths), prob, generator)


@given(configs(TRANSLATOR), st.lists(st.integers(1, 8), min_size=1, max_size=4), st.sampled_from([0.0, 0.4, 1.0]))
def test_mixed_inputs_equal_a_loop_over_every_token(config: ModelConfig, lengths: list[int], prob: float) -> None:
    network = translator(config)
    source, target, mixed = mix(network, lengths, prob, seed=5)
    drawn = torch.rand(target.shape, generator=torch.Generator().manual_seed(5))
    for row, length in enumerate(lengths):
        size = [6, 3, 4, 5][row]
        for t in range(target.shape[1]):
            expected = target[row, t]
            if 0 < t < length and drawn[row, t] < prob:
                logits = network(source[row : row + 1, :size], target[row : row + 1, :t])[0, -1]
                expected = logits.argmax()
            assert mixed[row, t] == expected


@given(configs(TRANSLATOR), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_packed_documents_keep_their_first_token(config: ModelConfig, lengths: list[int]) -> None:
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
        source_documents=Documents.from_lengths(sizes),
        target_documents=Documents.from_lengths(lengths),
    )
    separate = [
        scheduled_inputs(network, source, row, None, None, 1.0, torch.Generator())
        for source, row in zip(sources, rows, strict=True)
    ]
    assert torch.equal(packed, torch.cat(separate, 1))
    assert [row[0, 0] for row in separate] == [row[0, 0] for row in rows]


@given(configs(TRANSLATOR, norms=("layer", "rms")))
def test_probability_zero_is_teacher_forcing(config: ModelConfig) -> None:
    _, target, mixed = mix(translator(config), [5, 2, 7], 0.0)
    assert torch.equal(mixed, target)


@given(configs(TRANSLATOR, norms=("layer", "rms")), st.integers(0, 99))
def test_draws_depend_on_the_generator_only(config: ModelConfig, seed: int) -> None:
    network = translator(config)
    source, target = tokens(2, 6), tokens(2, 9)
    sizes, lengths = torch.tensor([6, 4]), torch.tensor([9, 8])

    def sample(number: int) -> Tensor:
        return scheduled_inputs(network, source, target, sizes, lengths, 0.5, torch.Generator().manual_seed(number))

    first = sample(seed)
    torch.rand(3)  # other draws make no difference
    assert torch.equal(sample(seed), first)


def tiny() -> EncoderDecoder:
    torch.manual_seed(1)
    settings = {"family": "encoder-decoder", "encoder_layers": 1, "decoder_layers": 1, "dim": 8, "heads": 2}
    return translator(ModelConfig.build(settings | {"vocab_size": VOCABULARY, "tie": "all"}))


def test_gradients_flow_through_the_second_pass_only() -> None:
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

    copy = mixed.detach().clone()
    assert torch.equal(gradient(mixed), gradient(copy)), "as if the mixed inputs were the data"
    assert not torch.equal(gradient(mixed), gradient(target))


def test_the_first_pass_has_dropout_when_the_network_trains() -> None:
    network = translator(tiny().config, dropout=0.9)
    source, target, lengths = tokens(4, 6), tokens(4, 12), torch.full((4,), 12)

    def sample() -> Tensor:
        return scheduled_inputs(network, source, target, None, lengths, 1.0, torch.Generator())

    assert torch.equal(sample(), sample())
    network.train()
    assert not torch.equal(sample(), sample())
    assert network.training


BEGIN, END = 1, 2


class Counting(EncoderDecoder):
    """Predicts n + 1 after n, but 7 after 5: one error, after which free-running never meets the target again."""

    def encode(self, source: Tensor, lengths: Tensor | None = None, **_: object) -> EncoderOutput:
        return EncoderOutput(source)

    def decode(self, target: Tensor, *_: object, **__: object) -> Tensor:  # type: ignore[override]
        assert not self.training
        return torch.where(target == 5, 7, target + 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden, 40).double()


def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    network = Counting(tiny().config)
    monkeypatch.setattr("clearhead.train.exposure_bias.argmax_tokens", lambda hidden, _: hidden)
    return network.train()


def test_one_error_costs_all_later_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    network = counting(monkeypatch)
    target = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 0, 0, 0]])
    result = exposure_bias(network, tokens(2, 3), torch.tensor([3, 3]), target, torch.tensor([7, 4]), eos_id=39)
    assert result.count.tolist() == [2, 2, 2, 1, 1, 1]
    assert result.teacher_forced.tolist() == [2, 2, 1, 1, 1, 1], "teacher forcing: one error, after 5"
    assert result.free_running.tolist() == [2, 2, 1, 0, 0, 0], "free-running never recovers"
    assert result.bias.tolist() == [0, 0, 0, 1, 1, 1]
    assert result.mean.item() == pytest.approx(3 / 9)
    assert network.training


def test_tokens_after_eos_are_not_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.tensor([[10, 11, 12, 13, 14]])
    result = exposure_bias(counting(monkeypatch), tokens(1, 3), torch.tensor([3]), target, torch.tensor([5]), eos_id=12)
    assert result.teacher_forced.tolist() == [1, 1, 1, 1]
    assert result.free_running.tolist() == [1, 1, 0, 0], "eos itself counts"


def test_batches_of_unequal_length_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    network = counting(monkeypatch)
    rows = [torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[10, 11, 12]])]
    results = [exposure_bias(network, tokens(1, 3), torch.tensor([3]), r, torch.tensor([r.shape[1]]), 39) for r in rows]
    for both in (results[0] + results[1], results[1] + results[0]):
        assert both.count.tolist() == [2, 2, 1, 1]
        assert both.teacher_forced.tolist() == [2, 2, 0, 1]
        assert both.free_running.tolist() == [2, 2, 0, 0]


@given(configs(TRANSLATOR), st.lists(st.integers(2, 8), min_size=1, max_size=4))
def test_exposure_bias_equals_a_loop_without_cache(config: ModelConfig, lengths: list[int]) -> None:
    network = translator(config).train()
    source, target = tokens(len(lengths), 5), tokens(len(lengths), max(lengths))
    sizes = torch.tensor([5, 2, 4, 3][: len(lengths)])
    result = exposure_bias(network, source, sizes, target, torch.tensor(lengths), END)
    assert network.training
    network.eval()
    teacher_forced, free_running = torch.zeros(max(lengths) - 1), torch.zeros(max(lengths) - 1)
    for row, length in enumerate(lengths):
        row_source, decoded, ended = source[row : row + 1, : sizes[row]], target[row : row + 1, :1], False
        for t in range(length - 1):
            label = target[row, t + 1]
            teacher_forced[t] += network(row_source, target[row : row + 1, : t + 1])[0, -1].argmax() == label
            token = network(row_source, decoded)[0, -1].argmax()
            free_running[t] += (token == label) & (not ended)
            ended = ended or bool(token == END)
            decoded = torch.cat([decoded, token.reshape(1, 1)], dim=1)
    assert result.teacher_forced.tolist() == teacher_forced.tolist()
    assert result.free_running.tolist() == free_running.tolist()
    assert result.bias[0] == 0, "the first prediction has the same input in both modes"
