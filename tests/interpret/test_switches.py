"""Switching a part off equals removing it from the weights; nothing stays switched off afterwards."""

import pytest
import torch

from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.interpret.switches import Switch, all_heads, all_parts, effect_of, loss_of, switched_off
from clearhead.interpret.trace import own_copy
from clearhead.model import build
from tests.strategies import VOCABULARY

SOURCE, TARGET = torch.tensor([[3, 1, 4, 1, 5, 2]]), torch.tensor([[1, 2, 3, 4, 5]])


def model(family: str, **settings):
    layers = {"encoder-decoder": {"encoder_layers": 2, "decoder_layers": 2}, "decoder": {"decoder_layers": 2},
              "encoder": {"encoder_layers": 2}}[family]  # fmt: skip
    config = ModelConfig(family=family, dim=16, heads=4, vocab_size=VOCABULARY, max_positions=64, **layers, **settings)
    network = build(config).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def logits(network) -> torch.Tensor:
    family = network.config.family
    ids = {"encoder-decoder": (SOURCE, TARGET), "encoder": (SOURCE,), "decoder": (TARGET,)}[family]
    with torch.no_grad():
        return network(*ids)[0]


def zero(network, *names: str, columns: slice = slice(None)) -> None:
    with torch.no_grad():
        for name in names:
            network.get_parameter(name)[..., columns] = 0


@pytest.mark.parametrize("position", ["pre", "post"])
def test_switching_off_equals_weights_of_zero(position: str) -> None:
    cases = {
        Switch("head", "encoder", 1, 2): (["encoder.layers.1.attention.output.weight"], slice(8, 12)),
        Switch("head", "cross", 0, 0): (["decoder.layers.0.cross_attention.output.weight"], slice(0, 4)),
        Switch("attention", "decoder", 1): ([f"decoder.layers.1.attention.output.{x}" for x in ("weight", "bias")],),
        Switch("cross", "cross", 1): ([f"decoder.layers.1.cross_attention.output.{x}" for x in ("weight", "bias")],),
        Switch("feed_forward", "encoder", 0): (
            [f"encoder.layers.0.feed_forward.down.{x}" for x in ("weight", "bias")],
        ),
    }
    for switch, (names, *columns) in cases.items():
        network = model("encoder-decoder", norm_position=position)
        before, copy = logits(network), own_copy(network)
        with switched_off(copy, [switch]):
            off = logits(copy)
        torch.testing.assert_close(logits(copy), before, rtol=0, atol=0)
        zero(network, *names, **({"columns": columns[0]} if columns else {}))
        torch.testing.assert_close(off, logits(network))
        assert not torch.equal(off, before)


def test_a_layer_that_is_off_passes_its_input_on() -> None:
    network = model("decoder")
    with switched_off(network, [Switch("layer", "decoder", 1)]):
        off = logits(network)
    del network.decoder.layers[1]
    del network.decoder.patterns[1]
    torch.testing.assert_close(off, logits(network))


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary"])
def test_without_positions_an_encoder_sees_a_bag_of_words(position: str) -> None:
    network = model("encoder", position=position)
    order = torch.tensor([5, 4, 3, 2, 1, 0])
    with switched_off(network, [Switch("positions", "encoder")]), torch.no_grad():
        torch.testing.assert_close(network(SOURCE)[0][order], network(SOURCE[:, order])[0])
    with torch.no_grad():
        assert not torch.allclose(network(SOURCE)[0][order], network(SOURCE[:, order])[0])


def test_without_the_mask_a_decoder_sees_the_future() -> None:
    network = model("decoder")
    other = TARGET.clone()
    other[0, -1] = 0
    with torch.no_grad():
        torch.testing.assert_close(network(TARGET)[0, 0], network(other)[0, 0])
        with switched_off(network, [Switch("mask", "decoder")]):
            assert not torch.allclose(network(TARGET)[0, 0], network(other)[0, 0])


def test_every_part_of_every_family_can_be_switched_off() -> None:
    for family, heads, parts in (("encoder-decoder", 24, 17), ("encoder", 8, 7), ("decoder", 8, 8)):
        network = model(family)
        before = logits(network)
        assert len(all_heads(network)) == heads
        assert len(all_parts(network)) == parts
        for switch in [*all_heads(network), *all_parts(network)]:
            with switched_off(network, [switch]):
                assert effect_of(before, logits(network), None).divergence > 0, switch
        torch.testing.assert_close(logits(network), before, rtol=0, atol=0)


def test_the_effect_is_kl_divergence_changed_tokens_and_loss() -> None:
    before = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    after = torch.tensor([[0.0, 2.0], [0.0, 1.0]])
    effect = effect_of(before, after, torch.tensor([0, -100]))
    p, q = before[0].double().softmax(0), after[0].double().softmax(0)
    assert effect.divergence == pytest.approx(float((p * (p / q).log()).sum()) / 2)
    assert effect.changed == 0.5
    assert effect.loss == pytest.approx(-float(q[0].log()))
    assert loss_of(before, None) is None


@pytest.mark.parametrize(
    "switch", [Switch("cross", "cross"), Switch("head", "decoder", 0, 9), Switch("layer", "decoder", 7),
               Switch("head", "encoder")]
)  # fmt: skip
def test_a_part_that_does_not_exist_is_an_error(switch: Switch) -> None:
    with pytest.raises(UserError), switched_off(model("decoder"), [switch]):
        pass
