"""Modules of the model: positions, norms, feed-forward, embedding, heads, dropout, initialization, caches."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from clearhead.config import ModelConfig, preset
from clearhead.model import Documents, KVCache, Mask, build
from clearhead.model.cost import count_parameters
from clearhead.model.feedforward import ACTIVATIONS
from clearhead.model.norms import BatchNorm
from clearhead.model.positions import sinusoidal_positions


def test_batch_norm_with_a_padding_mask_equals_torchs_without_the_padding() -> None:
    ours, theirs = BatchNorm(5, eps=1e-5), nn.BatchNorm1d(5)
    padding_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    for _ in range(3):  # several, for the running statistics
        x = torch.randn(2, 4, 5) * 3 + 1
        torch.testing.assert_close(ours(x, padding_mask)[padding_mask], theirs(x[padding_mask]))
    x = torch.randn(2, 4, 5)
    torch.testing.assert_close(ours.eval()(x, padding_mask)[padding_mask], theirs.eval()(x[padding_mask]))
    torch.testing.assert_close(ours.variance, theirs.running_var)


def test_layer_and_rms_norm_equal_their_formulas() -> None:
    x = torch.randn(2, 3, 128)
    layer = build(preset("tiny-gpt")).decoder.norm
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    rms = build(preset("tiny-llama")).decoder.norm
    torch.testing.assert_close(rms(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(), rtol=1e-4, atol=1e-5)
    assert not hasattr(rms, "bias")


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("relu", F.relu),
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("silu", lambda x: x * torch.sigmoid(x)),
    ],
)
def test_feed_forward_equals_its_formula(activation: str, function: object) -> None:
    feed = build(preset("tiny-gpt", [f"activation={activation}"])).decoder.layers[0].feed_forward
    x = torch.randn(3, 128)
    expected = function(x @ feed.up.weight.T + feed.up.bias) @ feed.down.weight.T + feed.down.bias  # type: ignore[operator]
    torch.testing.assert_close(feed(x), expected)


def test_gelu_with_gradients_equals_torchs_and_so_does_its_gradient() -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e4, 1e4])])
    trained, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    out, expected = ACTIVATIONS["gelu_tanh"](trained), F.gelu(exact, approximate="tanh")
    assert "SigmoidGelu" in type(out.grad_fn).__name__
    grad = torch.randn_like(x)
    out.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trained.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(ACTIVATIONS["gelu_tanh"](x), out)


def test_gelu_with_gradients_has_a_second_derivative() -> None:
    x = torch.linspace(-4, 4, 101, requires_grad=True)
    results = []
    for gelu in (ACTIVATIONS["gelu_tanh"], lambda x: F.gelu(x, approximate="tanh")):
        (derivative,) = torch.autograd.grad((gelu(x) + x**3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(derivative.sum(), x)[0])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_swiglu_equals_its_formula() -> None:
    feed = build(preset("tiny-llama")).decoder.layers[0].feed_forward
    x = torch.randn(3, 128)
    gate = x @ feed.gate.weight.T
    torch.testing.assert_close(feed(x), (gate * torch.sigmoid(gate) * (x @ feed.up.weight.T)) @ feed.down.weight.T)


@pytest.mark.parametrize(("tie", "matrices"), [("none", 3), ("output", 2), ("all", 1)])
def test_tying_leaves_one_two_or_three_matrices(tie: str, matrices: int) -> None:
    network = build(preset("tiny-translator", [f"tie={tie}"]))
    weights = (
        network.encoder.embedding.tokens.weight,
        network.decoder.embedding.tokens.weight,
        network.heads.lm_head.proj.weight,
    )
    assert len({weight.data_ptr() for weight in weights}) == matrices
    if tie == "output":
        assert weights[1] is weights[2]


def test_separate_vocabularies_have_their_own_sizes() -> None:
    data = ["vocab_size=null", "source_vocab_size=11", "target_vocab_size=13", "tie=output"]
    network = build(preset("tiny-translator", data))
    assert network(torch.tensor([[10]]), torch.tensor([[12]])).shape == (1, 1, 13)


def test_the_embedding_is_scaled_by_the_square_root_of_dim() -> None:
    on, off = (build(preset("tiny-translator", [f"scale_embedding={flag}", "dropout=0"])) for flag in ("true", "false"))
    off.load_state_dict(on.state_dict())
    ids, positions = torch.tensor([[3]]), torch.tensor([[0]])
    sinusoids = sinusoidal_positions(positions, 128)
    scaled, plain = (network.encoder.embedding(ids, positions) - sinusoids for network in (on, off))
    torch.testing.assert_close(scaled, plain * math.sqrt(128))


def test_dropout_applies_to_the_embedding_sum_and_to_every_sublayer_output() -> None:
    """Section 5.4. With dropout near 1 a post-norm layer is norm(x), and the embedding zero."""
    network = build(preset("tiny-translator", ["dropout=0.999999", "vocab_size=50"])).train()
    captured = {}
    for name in ("encoder.embedding", "encoder.layers.0.attention_norm", "decoder.layers.1.cross_norm"):
        network.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: captured.update({name: (args[0], out)})
        )
    network(torch.randint(50, (2, 6)), torch.randint(50, (2, 6)))
    assert (captured["encoder.embedding"][1] == 0).float().mean() > 0.99
    assert (captured["encoder.layers.0.attention_norm"][0] == 0).float().mean() > 0.99
    before = captured["decoder.layers.1.cross_norm"][0]
    torch.testing.assert_close(before.std(dim=-1), torch.zeros_like(before[..., 0]), rtol=0, atol=1e-3)


def test_segments_and_heads_of_an_encoder() -> None:
    outputs = ["outputs=[lm, next-sentence, classes, tags, span]", "labels=5"]
    network = build(preset("tiny-encoder", outputs)).eval()
    ids, lengths = torch.randint(4000, (2, 7)), torch.tensor([7, 4])
    first, second = torch.zeros(2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
    hidden = network.encode(ids, lengths, segments=first)
    torch.testing.assert_close(hidden, network.encode(ids, lengths))
    assert not torch.allclose(hidden, network.encode(ids, lengths, segments=second))
    heads, pooled = network.heads, network.heads.pool(hidden)
    assert network.logits(hidden).shape == (2, 7, 4000)
    assert heads.next_sentence(pooled).shape == (2, 2)
    assert heads.classes(pooled).shape == (2, 5)
    assert heads.tags(hidden).shape == (2, 7, 5)
    assert heads.span(hidden).shape == (2, 7, 2)


def test_a_decoder_pools_the_last_token_before_padding_and_that_of_each_document() -> None:
    heads = build(preset("tiny-gpt", ["outputs=classes", "labels=3"])).heads
    hidden = torch.randn(2, 5, 128)
    assert torch.equal(heads.pool(hidden, torch.tensor([5, 2])), torch.stack([hidden[0, 4], hidden[1, 1]]))
    packed = heads.pool(hidden[:1], documents=Documents.from_lengths([2, 3]))
    assert torch.equal(packed, hidden[0, [1, 4]])


def test_logits_of_a_model_without_an_lm_head_are_refused() -> None:
    network = build(preset("tiny-encoder", ["outputs=tags", "labels=3"]))
    with pytest.raises(ValueError, match="no lm_head, only tags"):
        network(torch.tensor([[1, 2]]))


def test_a_sequence_beyond_max_positions_or_capacity_is_refused_before_it_is_computed() -> None:
    network = build(preset("tiny-gpt", ["max_positions=8"]))
    with pytest.raises(ValueError, match="9 tokens is longer than max_positions 8"):
        network(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="longer than max_positions"):
        KVCache(network.config, rows=1, capacity=9)
    cache = KVCache(network.config, rows=1, capacity=4)
    network(torch.zeros(1, 3, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="holds 4 tokens a row, 5 are needed"):
        network(torch.zeros(1, 2, dtype=torch.long), cache=cache)
    assert cache.lengths.tolist() == [3], "a refused step must not change the cache"


@pytest.mark.parametrize(
    ("name", "part", "std"),
    [
        ("tiny-translator", "decoder.embedding.tokens", 128**-0.5),
        ("tiny-translator", "encoder.layers.0.attention.query", math.sqrt(2 / (128 + 128))),
        ("tiny-translator", "encoder.layers.0.feed_forward.up", math.sqrt(2 / (128 + 512))),
        ("tiny-encoder", "encoder.embedding.tokens", 0.02 * 0.8796),  # the std of a normal truncated at two deviations
        ("tiny-gpt", "decoder.embedding.tokens", 0.02),
        ("tiny-gpt", "decoder.embedding.positions", 0.01),
        ("tiny-gpt", "decoder.layers.1.attention.output", 0.02 / math.sqrt(4)),
        ("tiny-gpt", "decoder.layers.1.feed_forward.down", 0.02 / math.sqrt(4)),
        ("tiny-gpt", "decoder.layers.1.feed_forward.up", 0.02),
        ("tiny-llama", "decoder.layers.1.feed_forward.down", 0.02),
    ],
)
def test_weights_are_initialized_as_each_family_publishes(name: str, part: str, std: float) -> None:
    network = build(preset(name))
    module = network.get_submodule(part)
    assert module.weight.std().item() == pytest.approx(std, rel=0.03)
    if getattr(module, "bias", None) is not None:
        assert module.bias.abs().max() == 0
    if name == "tiny-encoder":
        assert module.weight.abs().max() <= 0.04


@pytest.mark.parametrize(("pooler", "std"), [(True, 64**-0.5), (False, 0.02 * 0.8796)])
def test_a_classifier_on_a_pooler_starts_with_larger_weights(pooler: bool, std: float) -> None:
    network = build(preset("tiny-encoder", [f"pooler={pooler}", "dim=64", "outputs=classes", "labels=500"]))
    assert network.heads.classes.proj.weight.std().item() == pytest.approx(std, rel=0.03)


def test_the_same_seed_builds_the_same_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(build(preset("tiny-llama")).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_meta_network_can_be_loaded_later() -> None:
    """The state dict is complete: no table is in a non-persistent buffer."""
    for name in ("tiny-translator", "tiny-encoder", "tiny-gpt", "tiny-llama"):
        config: ModelConfig = preset(name)
        full, empty = build(config).eval(), build(config, "meta").eval()
        empty.load_state_dict(full.state_dict(), assign=True)
        assert count_parameters(empty) == count_parameters(full), "tied weights stay tied"
        ids = torch.randint(4000, (1, 5))
        inputs = (ids, ids) if config.family == "encoder-decoder" else (ids,)
        assert torch.equal(full(*inputs), empty(*inputs))


def test_tied_weights_stay_tied_when_moved_copied_or_loaded() -> None:
    for name in ("tiny-translator", "tiny-gpt"):
        config = preset(name)
        count = count_parameters(build(config))
        moved = build(config, "meta").to_empty(device="cpu")
        assert count_parameters(moved) == count
        assert count_parameters(copy.deepcopy(moved).double()) == count
        moved.load_state_dict({key: tensor.clone() for key, tensor in build(config).state_dict().items()}, assign=True)
        assert count_parameters(moved) == count


def test_batch_norm_sums_in_fp32_and_ignores_a_batch_of_padding() -> None:
    norm = BatchNorm(4, eps=1e-5).half()
    out = norm(torch.full((2, 40_000, 4), 3.0).half())
    assert out.isfinite().all()
    before = norm.mean.clone()
    norm(torch.randn(2, 3, 4).half(), torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(norm.mean, before)


def test_a_network_with_batch_norm_ignores_padding() -> None:
    network = build(preset("tiny-gpt", ["norm=batch", "dropout=0", "attention_dropout=0"])).train()
    ids, lengths = torch.randint(4000, (2, 9)), torch.tensor([5, 3])
    padding_mask = torch.arange(5) < lengths[:, None]
    short, padded = network(ids[:, :5], lengths), network(ids, lengths)
    torch.testing.assert_close(short[padding_mask], padded[:, :5][padding_mask], rtol=1e-4, atol=1e-5)


def test_patterns_larger_than_the_row_cost_no_extra_flops() -> None:
    ids = torch.randint(4000, (1, 10))
    for attention in (["attention=strided", "stride=1000000"], ["attention=fixed", "stride=1000000", "summary=5"]):
        network = build(preset("tiny-gpt", attention)).eval()
        with FlopCounterMode(display=False) as counter:
            network(ids)
        assert counter.get_total_flops() < 3e8


@pytest.mark.parametrize(("name", "stack"), [("tiny-gpt", "decoder"), ("tiny-translator", "encoder")])
def test_a_layer_whose_sublayers_are_dropped_is_the_identity_up_to_norms(name: str, stack: str) -> None:
    """Pre-norm (GPT): x itself; post-norm (the translator): x, normed twice."""
    layer = getattr(build(preset(name, ["dropout=0.999999"])), stack).layers[0].train()
    x = torch.randn(2, 6, 128)
    torch.testing.assert_close(layer(x, Mask()), x if layer.pre else layer.feed_forward_norm(layer.attention_norm(x)))


def test_attention_dropout_acts_in_training_only() -> None:
    network, ids = build(preset("tiny-gpt", ["dropout=0", "attention_dropout=0.5"])), torch.randint(4000, (1, 8))
    assert not torch.equal(network.train()(ids), network(ids))
    assert torch.equal(network.eval()(ids), network(ids))


def test_a_label_head_has_dropout_before_its_projection() -> None:
    head = build(preset("tiny-gpt", ["outputs=classes", "labels=3", "dropout=0.999999"])).train().heads.classes
    torch.testing.assert_close(head(torch.randn(4, 128)), head.proj.bias.expand(4, 3))


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("bias", [True, False])
def test_biases_are_everywhere_or_nowhere(bias: bool, norm: str) -> None:
    changes = ["pooler=false", "outputs=lm", "output_bias=false", "activation=swiglu"]
    network = build(preset("tiny-encoder", [*changes, f"norm={norm}", f"bias={str(bias).lower()}"]))
    parts = [module for module in network.modules() if isinstance(module, nn.Linear | nn.LayerNorm | BatchNorm)]
    assert {part.bias is not None for part in parts if part is not network.heads.lm_head.proj} == {bias}


@pytest.mark.parametrize("kind", ["layer", "rms", "batch"])
def test_every_norm_has_the_eps_of_the_config(kind: str) -> None:
    network = build(preset("tiny-gpt", [f"norm={kind}", "norm_eps=0.01"]))
    assert {module.eps for module in network.modules() if hasattr(module, "eps")} == {0.01}


def test_learned_positions_are_added_unscaled() -> None:
    embedding = build(preset("tiny-gpt", ["scale_embedding=true", "dropout=0"])).decoder.embedding
    expected = embedding.tokens.weight[3] * math.sqrt(128) + embedding.positions.weight[2]
    torch.testing.assert_close(embedding(torch.tensor([[3]]), torch.tensor([[2]]))[0, 0], expected)


@pytest.mark.parametrize("name", ["tiny-translator", "tiny-encoder", "tiny-gpt", "tiny-llama"])
def test_a_bf16_network_has_bf16_logits(name: str) -> None:
    network, ids = build(preset(name)).bfloat16().eval(), torch.randint(4000, (1, 5))
    assert network(*((ids, ids) if name == "tiny-translator" else (ids,))).dtype == torch.bfloat16


def test_an_encoder_pools_first_tokens_and_a_decoder_last_ones() -> None:
    hidden, documents = torch.randn(2, 5, 128), Documents.from_lengths([2, 3])
    encoder = build(preset("tiny-encoder", ["pooler=false", "outputs=classes", "labels=3"])).heads
    assert torch.equal(encoder.pool(hidden, torch.tensor([5, 2])), hidden[:, 0])
    assert torch.equal(encoder.pool(hidden[:1], documents=documents), hidden[0, [0, 2]])
    decoder = build(preset("tiny-gpt", ["outputs=classes", "labels=3"])).heads
    assert torch.equal(decoder.pool(hidden), hidden[:, -1])


@pytest.mark.parametrize("name", ["tiny-encoder", "tiny-gpt"])
def test_mean_pooling_averages_tokens_without_padding(name: str) -> None:
    hidden = torch.randn(2, 5, 128)
    heads = build(preset(name, ["pooling=mean", "pooler=false", "outputs=classes", "labels=3"])).heads
    expected = torch.stack([hidden[0].mean(0), hidden[1, :2].mean(0)])
    torch.testing.assert_close(heads.pool(hidden, torch.tensor([5, 2])), expected)
    packed = torch.cat([hidden[0], hidden[1, :2]])[None]
    torch.testing.assert_close(heads.pool(packed, documents=Documents.from_lengths([5, 2])), expected)


def test_a_row_and_each_document_may_fill_max_positions() -> None:
    network = build(preset("tiny-gpt", ["max_positions=8"]))
    assert network(torch.zeros(1, 8, dtype=torch.long), cache=KVCache(network.config, 1, capacity=8)).shape[1] == 8
    ids = torch.zeros(1, 12, dtype=torch.long)
    assert network(ids[:, :8]).shape[1] == 8
    assert network(ids, documents=Documents.from_lengths([8, 4])).shape[1] == 12
    with pytest.raises(ValueError, match="9 tokens is longer than max_positions 8"):
        network(ids, documents=Documents.from_lengths([9, 3]))


def test_padding_of_a_step_may_exceed_the_capacity_of_a_cache() -> None:
    network = build(preset("tiny-gpt", ["max_positions=8"])).eval()
    cache, texts = KVCache(network.config, rows=2, capacity=8), [torch.empty(0, dtype=torch.long)] * 2
    for tokens, counts in ((9, [7, 2]), (6, [1, 6])):  # both rows end full
        ids = torch.randint(4000, (2, tokens))
        out = network(ids, torch.tensor(counts), cache=cache)
        for row, count in enumerate(counts):
            texts[row] = torch.cat([texts[row], ids[row, :count]])
            torch.testing.assert_close(out[row, :count], network(texts[row][None])[0, -count:], rtol=1e-4, atol=1e-4)
    assert cache.lengths.tolist() == [8, 8]


def test_scaled_init_counts_decoder_layers_and_covers_cross_attention() -> None:
    network = build(preset("tiny-translator", ["init=scaled", "encoder_layers=1", "decoder_layers=8"]))
    for name in ("attention", "cross_attention"):
        weight = network.decoder.layers[0].get_submodule(name).output.weight
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
