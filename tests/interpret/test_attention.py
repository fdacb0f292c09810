"""Captured attention: the weights of the pass itself, with a cache, across languages, in quantized layers."""

import torch

from clearhead.config import preset
from clearhead.interpret import capture_attention
from clearhead.model import KVCache, build
from tests.quantization import quantize_module


def test_weights_are_a_distribution_over_visible_keys() -> None:
    network = build(preset("tiny-gpt")).eval()
    with torch.no_grad(), capture_attention(network) as traces:
        network(torch.randint(4000, (2, 6)))
    weights = traces["decoder.layers.1.attention"].weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    assert weights.triu(1).abs().max() == 0
    assert weights[:, :, 0, 0].min() == 1, "the first token sees itself alone"


def test_a_cached_step_has_the_weights_of_the_full_pass() -> None:
    network, ids = build(preset("tiny-llama")).eval(), torch.randint(4000, (2, 6))
    cache = KVCache(network.config, rows=2, capacity=6)
    with torch.no_grad(), capture_attention(network) as traces:
        network(ids)
        full = traces["decoder.layers.1.attention"]
        network(ids[:, :5], cache=cache)
        network(ids[:, 5:], cache=cache)
        step = traces["decoder.layers.1.attention"]
    torch.testing.assert_close(step.weights, full.weights[:, :, 5:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.updates, full.updates[:, :, 5:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.q, full.q[:, :, 5:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.k, full.k, rtol=1e-4, atol=1e-5)


def test_cross_attention_has_the_same_weights_with_a_cache() -> None:
    network = build(preset("tiny-translator")).eval()
    source, target = torch.randint(4000, (1, 7)), torch.randint(4000, (1, 3))
    cache = KVCache(network.config, rows=1, capacity=3)
    with torch.no_grad(), capture_attention(network) as traces:
        network(source, target)
        full = traces["decoder.layers.0.cross_attention"]
        network.decode(target, network.encode(source), cache=cache)
        cached = traces["decoder.layers.0.cross_attention"]
    assert full.weights.shape == (1, 4, 3, 7)
    assert full.k.shape == (1, 4, 7, 32)
    torch.testing.assert_close(cached.weights, full.weights)


def test_capturing_changes_nothing_and_removes_its_hooks() -> None:
    network, ids = build(preset("tiny-gpt")).eval(), torch.randint(4000, (1, 5))
    before = network(ids)
    with capture_attention(network) as traces:
        assert torch.equal(network(ids), before)
    captured = dict(traces)
    network(ids)
    assert traces == captured
    assert not any(module._forward_hooks for module in network.modules())


def test_updates_of_a_quantized_layer_are_close_to_its_output() -> None:
    network = quantize_module(build(preset("tiny-gpt")).eval())
    with torch.no_grad(), capture_attention(network) as traces:
        network(torch.randint(4000, (1, 5)))
    trace = traces["decoder.layers.0.attention"]
    total = trace.updates.sum(1) + trace.bias
    assert (total - trace.output).norm() < 0.05 * trace.output.norm()


def test_each_head_has_its_own_updates() -> None:
    network, ids = build(preset("tiny-gpt")).eval(), torch.arange(6)[None]
    layer = network.decoder.layers[0].attention
    with torch.no_grad():
        layer.output.weight[:, :32] = 0  # the first head's slice
    with capture_attention(network) as traces:
        network(ids)
    trace = traces["decoder.layers.0.attention"]
    assert trace.updates[:, 0].abs().max() == 0
    assert trace.updates[:, 1:].abs().amax(dim=(0, 2, 3)).min() > 0
    torch.testing.assert_close(trace.weights.sum(dim=-1), torch.ones(1, 4, 6))
    assert trace.weights.triu(1).abs().max() == 0
    network(ids)
    assert traces["decoder.layers.0.attention"] is trace
