"""Every number of a trace equals a recomputation from the formula, for random models of all families."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.interpret.trace import own_copy, trace_network
from tests.inference.random_models import FEW
from tests.strategies import VOCABULARY, configs, network_of

SOURCE, TARGET = [3, 1, 4, 1, 5, 2], [1, 2, 3, 4, 5]


def traced(config: ModelConfig):
    network = network_of(config).double().requires_grad_(False)
    source = None if config.family == "decoder" else SOURCE
    target = None if config.family == "encoder" else TARGET
    return network, trace_network(own_copy(network), source, target)


@FEW
@given(configs(), st.integers(0, 10_000))
def test_every_step_of_a_head_follows_from_the_one_before(config: ModelConfig, seed: int) -> None:
    torch.manual_seed(seed)
    _, trace = traced(config)
    for kind in trace.kinds:
        layer = trace.depth(kind) - 1
        found = trace.at(kind, layer).layer
        for head in range(config.heads):
            steps = trace.steps(kind, layer, head)
            group = head // (config.heads // config.kv_heads)
            rows = slice(group * config.head_dim, (group + 1) * config.head_dim)
            bias = None if found.value.bias is None else found.value.bias[rows]
            v = F.linear(steps.source, found.value.weight[rows], bias)
            torch.testing.assert_close(steps.v, v)
            torch.testing.assert_close(steps.scores, torch.einsum("te,se->ts", steps.q, steps.k))
            torch.testing.assert_close(steps.scaled, steps.scores / math.sqrt(config.head_dim))
            masked = steps.scaled.masked_fill(~steps.mask, -math.inf)
            torch.testing.assert_close(steps.weights, masked.softmax(-1).nan_to_num(0))
            torch.testing.assert_close(steps.output, steps.weights @ steps.v)
            torch.testing.assert_close(steps.update, steps.weights @ steps.value_up)
            if steps.q_unrotated is not None:  # a rotation keeps the length
                torch.testing.assert_close(steps.q_unrotated.norm(dim=-1), steps.q.norm(dim=-1), rtol=1e-5, atol=1e-7)
        bias = 0 if found.output.bias is None else found.output.bias
        torch.testing.assert_close(trace.updates(kind, layer).sum(0) + bias, steps.sublayer)


@FEW
@given(configs(), st.integers(0, 10_000))
def test_the_residual_stream_adds_up_to_the_output_of_the_network(config: ModelConfig, seed: int) -> None:
    torch.manual_seed(seed)
    network, trace = traced(config)
    for (name, number), layer in trace.layers.items():
        block = getattr(network, name).layers[number]
        x = layer.x
        sublayers = [(layer.attention, block.attention_norm), (layer.feed_forward, block.feed_forward_norm)]
        if layer.cross is not None:
            sublayers.insert(1, (layer.cross, block.cross_norm))
        for added, norm in sublayers:
            x = x + added if block.pre else norm(x + added)
        torch.testing.assert_close(layer.output, x)
        if (name, number + 1) in trace.layers:
            torch.testing.assert_close(trace.layers[name, number + 1].x, layer.output)
    source, target = torch.tensor([SOURCE]), torch.tensor([TARGET])
    ids = {"encoder-decoder": (source, target), "encoder": (source,), "decoder": (target,)}[config.family]
    if network.heads.lm_head is not None:
        torch.testing.assert_close(trace.logits(), network(*ids)[0])
        torch.testing.assert_close(trace.lens()[-1], network(*ids)[0])


def network_and_trace(family: str, **settings):
    config = ModelConfig(family=family, dim=16, heads=2, vocab_size=VOCABULARY, max_positions=64, **settings)
    return traced(config)


def test_an_overview_is_the_weights_of_all_heads_in_bytes() -> None:
    _, trace = network_and_trace("encoder-decoder", encoder_layers=2, decoder_layers=2)
    for kind, shape in {"encoder": (2, 2, 6, 6), "decoder": (2, 2, 5, 5), "cross": (2, 2, 5, 6)}.items():
        overview = trace.overview(kind)
        assert overview.shape == shape
        exact = trace.steps(kind, 1, 1).weights
        assert (overview[1, 1] / 255 - exact).abs().max() <= 0.5 / 255 + 1e-9


def test_a_copy_of_its_own_shares_parameters_but_not_hooks() -> None:
    network, _ = network_and_trace("decoder", decoder_layers=1)
    copy = own_copy(network)
    assert all(a is b for a, b in zip(network.parameters(), copy.parameters(), strict=True))
    copy.decoder.layers[0].register_forward_hook(lambda *_: None)
    assert not network.decoder.layers[0]._forward_hooks


def test_a_part_that_does_not_exist_is_named() -> None:
    _, trace = network_and_trace("decoder", decoder_layers=1)
    with pytest.raises(UserError, match=r"cross layer 0.*it has decoder \(1 layers\) of 2 heads"):
        trace.steps("cross", 0, 0)
    with pytest.raises(UserError, match="head 2"):
        trace.steps("decoder", 0, 2)


def test_nan_in_the_weights_is_an_error_in_words() -> None:
    network, _ = network_and_trace("decoder", decoder_layers=1)
    with torch.no_grad():
        network.decoder.layers[0].feed_forward.up.weight[0, 0] = math.nan
    with pytest.raises(UserError, match="NaN"):
        trace_network(network, None, TARGET)
