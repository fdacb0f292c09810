"""What `watch` sees: the weights of the pass itself, with a cache, across languages, in small layers."""

import torch

from clearhead.config import preset
from clearhead.interpret import capture_attention
from clearhead.model import KVCache, build
from tests.quantization import quantize_module


def test_weights_are_a_distribution_over_what_may_be_seen() -> None:
    network = build(preset("tiny-gpt")).eval()
    with torch.no_grad(), capture_attention(network) as looks:
        network(torch.randint(4000, (2, 6)))
    weights = looks["decoder.layers.1.attention"].weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    assert weights.triu(1).abs().max() == 0
    assert weights[:, :, 0, 0].min() == 1, "the first token has itself alone to look at"


def test_a_cached_step_looks_as_the_whole_pass_does() -> None:
    network, ids = build(preset("tiny-llama")).eval(), torch.randint(4000, (2, 6))
    cache = KVCache(network.config, rows=2, capacity=6)
    with torch.no_grad(), capture_attention(network) as looks:
        network(ids)
        whole = looks["decoder.layers.1.attention"]
        network(ids[:, :5], cache=cache)
        network(ids[:, 5:], cache=cache)
        step = looks["decoder.layers.1.attention"]
    torch.testing.assert_close(step.weights, whole.weights[:, :, 5:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.updates, whole.updates[:, :, 5:], rtol=1e-4, atol=1e-5)


def test_a_translator_shows_where_it_looks_in_the_source() -> None:
    network = build(preset("tiny-translator")).eval()
    source, target = torch.randint(4000, (1, 7)), torch.randint(4000, (1, 3))
    cache = KVCache(network.config, rows=1, capacity=3)
    with torch.no_grad(), capture_attention(network) as looks:
        network(source, target)
        whole = looks["decoder.layers.0.cross_attention"]
        network.decode(target, network.encode(source), cache=cache)
        cached = looks["decoder.layers.0.cross_attention"]
    assert whole.weights.shape == (1, 4, 3, 7)
    torch.testing.assert_close(cached.weights, whole.weights)


def test_watching_changes_nothing_and_leaves_nothing_behind() -> None:
    network, ids = build(preset("tiny-gpt")).eval(), torch.randint(4000, (1, 5))
    before = network(ids)
    with capture_attention(network) as looks:
        assert torch.equal(network(ids), before)
    seen = dict(looks)
    network(ids)
    assert looks == seen
    assert not any(module._forward_hooks for module in network.modules())


def test_updates_of_a_quantized_layer_are_close_to_its_output() -> None:
    network = quantize_module(build(preset("tiny-gpt")).eval())
    with torch.no_grad(), capture_attention(network) as looks:
        network(torch.randint(4000, (1, 5)))
    look = looks["decoder.layers.0.attention"]
    total = look.updates.sum(1) + look.bias
    assert (total - look.output).norm() < 0.05 * look.output.norm()


def test_each_head_has_its_own_look_and_nothing_is_watched_afterwards() -> None:
    network, ids = build(preset("tiny-gpt")).eval(), torch.arange(6)[None]
    layer = network.decoder.layers[0].attention
    with torch.no_grad():
        layer.output.weight[:, :32] = 0  # what the first head would write
    with capture_attention(network) as looks:
        network(ids)
    look = looks["decoder.layers.0.attention"]
    assert look.updates[:, 0].abs().max() == 0
    assert look.updates[:, 1:].abs().amax(dim=(0, 2, 3)).min() > 0
    torch.testing.assert_close(look.weights.sum(dim=-1), torch.ones(1, 4, 6))
    assert look.weights.triu(1).abs().max() == 0
    network(ids)
    assert looks["decoder.layers.0.attention"] is look
