"""An optimized network equals the original, which is unchanged; quantized ones are close to it and smaller."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from clearhead.config import GenerationConfig, ModelConfig, preset
from clearhead.inference import ModelRunner, alignment_weights, optimize_for_inference
from clearhead.inference.optimize import FusedAttention, FusedFeedForward, PackedLinear
from clearhead.model import build
from clearhead.model.cache import KVCache
from clearhead.ops.linear.packed_weight import NativeLinear
from clearhead.ops.linear.quantized import PackedInt8Weight, QuantizedLinear
from tests.inference.peers import gpt2, llama, marian, random_rows
from tests.inference.random_models import FEW, generative_configs, random_model, rows_for, same_outputs
from tests.inference.reference import search
from tests.inference.test_parity_transformers import generate_ours
from tests.strategies import VOCABULARY, configs, network_of

PRESETS = ["tiny-translator", "tiny-encoder", "tiny-gpt", "tiny-llama"]
EPS = torch.finfo(torch.float32).eps


def logits_of(network: Any, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The logits for ids, which a translator gets as source and target."""
    with torch.inference_mode():
        if network.config.family == "encoder-decoder":
            return network(ids, ids, lengths, lengths)
        return network(ids, lengths)


@FEW
@given(configs(), st.data())
def test_fused_and_packed_networks_equal_the_original(config: ModelConfig, data: st.DataObject) -> None:
    network, ids = network_of(config), torch.randint(VOCABULARY, (3, 6))
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 6), min_size=3, max_size=3)))
    padding_mask = torch.arange(6) < lengths[:, None]
    fused = optimize_for_inference(network)
    torch.testing.assert_close(
        logits_of(fused, ids, lengths)[padding_mask], logits_of(network, ids, lengths)[padding_mask]
    )
    packed, expected = optimize_for_inference(network.float()), logits_of(network, ids, lengths)
    scale = expected[padding_mask].abs().max().clamp(min=1)
    tolerance = 1e-4 if config.qk_norm else 1e-5  # normalizing a small head amplifies rounding
    assert (logits_of(packed, ids, lengths) - expected)[padding_mask].abs().max() <= tolerance * scale


def translator(*overrides: str) -> tuple[Any, Any]:
    """A small translator with different norms in each layer, and its optimized copy."""
    torch.manual_seed(0)
    network = build(preset("tiny-translator", overrides)).eval()
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return network, optimize_for_inference(network)


def test_int8_of_a_bf16_network_equals_int8_of_the_same_weights_in_fp32(between: str) -> None:
    network, _ = translator("norm_position=post")
    source, target = torch.randint(4000, (3, 5)), torch.randint(4000, (3, 1))
    fp32 = build(network.config).eval()
    fp32.load_state_dict(network.bfloat16().float().state_dict())
    results = []
    for original in (network.bfloat16(), fp32):
        optimized = optimize_for_inference(original, torch.int8)
        with torch.inference_mode():
            cache = KVCache(optimized.config, 3, 4)
            optimized.decode(target, optimized.encode(source), cache=cache)
            results.append(optimized.decode(target, None, cache=cache).float())
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("lengths", [torch.tensor([5, 2, 4], dtype=torch.int32), torch.tensor(5).expand(3)])
def test_source_lengths_may_be_int32_or_expanded(lengths: Tensor, between: str) -> None:
    network, optimized = translator("norm_position=post")
    source, target = torch.randint(4000, (3, 5)), torch.randint(4000, (3, 3))
    with torch.inference_mode():
        cache = KVCache(optimized.config, 3, 4)
        optimized.decode(target[:, :2], optimized.encode(source, lengths), cache=cache)
        logits = optimized.logits(optimized.decode(target[:, 2:], None, cache=cache))
        torch.testing.assert_close(logits[:, 0], network(source, target, lengths)[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_every_family_is_fused_and_packed_and_shares_its_embeddings(name: str) -> None:
    network = build(preset(name)).eval()
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    optimized, ids = optimize_for_inference(network), torch.randint(4000, (2, 9))
    kinds = [type(module) for module in optimized.modules()]
    assert {FusedAttention, FusedFeedForward, PackedLinear} <= set(kinds)
    assert nn.Linear not in kinds
    torch.testing.assert_close(logits_of(optimized, ids), logits_of(network, ids), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())
    assert nn.Linear in [type(module) for module in network.modules()]
    stacks = [(getattr(optimized, side, None), getattr(network, side, None)) for side in ("encoder", "decoder")]
    for stack, original in ((a, b) for a, b in stacks if b is not None):
        assert stack.embedding.tokens.weight is original.embedding.tokens.weight, "shared, not copied"


@pytest.mark.parametrize("make", [marian, gpt2, llama], ids=lambda make: make.__name__)
@pytest.mark.parametrize("beam", [1, 3])
def test_an_optimized_network_generates_the_same_outputs(make: Any, beam: int) -> None:
    pair, rows = make(), random_rows(12)
    config = GenerationConfig(max_new_tokens=10, beam=beam, logprobs=True)
    optimized = pair._replace(ours=optimize_for_inference(pair.ours))
    assert same_outputs(generate_ours(optimized, rows, config), generate_ours(pair, rows, config), within=1e-5)


def test_alignments_of_an_optimized_network_are_the_same() -> None:
    network = marian().ours
    weights = alignment_weights(optimize_for_inference(network), [3, 4, 5], [60], [7, 8])
    torch.testing.assert_close(weights, alignment_weights(network, [3, 4, 5], [60], [7, 8]), rtol=1e-5, atol=1e-6)


def test_bf16_networks_compute_in_fp32_unless_bf16_is_requested() -> None:
    network, ids = build(preset("tiny-translator")).eval().bfloat16(), torch.randint(4000, (2, 9))
    optimized = optimize_for_inference(network)
    fp32 = build(preset("tiny-translator")).eval()
    fp32.load_state_dict(network.state_dict())  # the same values, which are exact in fp32
    assert logits_of(optimized, ids).dtype == torch.float32
    torch.testing.assert_close(logits_of(optimized, ids), logits_of(fp32, ids), rtol=1e-5, atol=1e-5)
    assert {tensor.dtype for tensor in network.parameters()} == {torch.bfloat16}
    embedding = optimized.decoder.embedding.tokens.weight
    assert embedding is optimized.encoder.embedding.tokens.weight, "tied weights stay tied"
    bf16 = logits_of(optimize_for_inference(fp32, torch.bfloat16), ids)
    assert bf16.dtype == torch.bfloat16
    assert (bf16.float() - logits_of(fp32, ids)).norm() < 0.05 * logits_of(fp32, ids).norm()


@given(st.integers(2, 40), st.integers(1, 70), st.sampled_from([7, 32, 96]), st.booleans())
def test_the_error_of_an_int8_linear_is_within_its_bound(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    """Both factors are off by at most half a step, a step being the largest of the row over 127.

    |Σ (x + d)(w + e) - Σ x w| ≤ Σ |x| |e| + |w| |d| + |d| |e|
    """
    linear, x = nn.Linear(inputs, outputs, bias=bias), torch.randn(rows, inputs)
    weight = linear.weight.detach()
    d, e = (values.abs().amax(dim=1) / 254 * (1 + 8 * EPS) for values in (x, weight))  # (rows,), (outputs,)
    bound = x.abs().sum(1)[:, None] * e + d[:, None] * weight.abs().sum(1) + inputs * d[:, None] * e
    with torch.no_grad():
        error = (QuantizedLinear(linear)(x).double() - linear.double()(x.double())).abs()
    assert (error <= bound + 1e-5).all()
    assert outputs * rows < 50 or error.max() > 0


@pytest.mark.parametrize("name", PRESETS)
def test_int8_is_close_to_fp32_in_every_family(name: str) -> None:
    network, ids = build(preset(name)).eval(), torch.randint(4000, (2, 9))
    quantized = optimize_for_inference(network, torch.int8)
    kinds = {type(module) for module in quantized.modules()}
    assert kinds & {QuantizedLinear, NativeLinear}
    assert not kinds & {nn.Linear, PackedLinear}
    logits, expected = logits_of(quantized, ids), logits_of(network, ids)
    assert (logits - expected).norm() < 0.05 * expected.norm()
    assert not torch.equal(logits, expected)


@FEW
@given(generative_configs, st.integers(0, 1 << 30))
def test_in_int8_a_row_never_depends_on_its_batch_mates(config: ModelConfig, seed: int) -> None:
    """Linear layers are exact for each row; attention may sum in another order, which can decide only near ties."""
    network = optimize_for_inference(random_model(config).float(), torch.int8)
    rows = rows_for(config, seed)
    together = _prefill_logits(network, rows)
    for row, logits in zip(rows, together, strict=True):
        alone = _prefill_logits(network, [row])[0]
        step = alone.abs().max() / 127  # a difference in the last bit may become one quantization step
        assert (logits - alone).abs().max() <= 2 * step
        assert torch.corrcoef(torch.stack([logits, alone]))[0, 1] > 0.99 or alone.std() < 1e-3


def _prefill_logits(network: Any, rows: Any) -> Tensor:
    sources, prompts = zip(*rows, strict=True)
    with torch.inference_mode():
        return ModelRunner(network, len(rows), 20).prefill(prompts, sources if any(sources) else None)


def test_int8_weights_take_a_quarter_of_fp32_and_half_with_the_packed_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.inference.optimize.step_library", lambda: None)
    network = build(preset("transformer-base").model_copy(update={"encoder_layers": 1, "decoder_layers": 1})).eval()
    quantized = optimize_for_inference(network, torch.int8)
    fp32_bytes = sum(module.weight.nbytes for module in network.modules() if type(module) is nn.Linear)
    layers = [module for module in quantized.modules() if isinstance(module, QuantizedLinear)]
    assert sum(layer.weight.nbytes + layer.scale.nbytes for layer in layers) < 0.26 * fp32_bytes
    logits_of(quantized, torch.randint(4000, (2, 9)))
    packed = sum(layer._packed.weights.numel() for layer in layers if isinstance(layer._packed, PackedInt8Weight))
    assert sum(layer.weight.nbytes for layer in layers) == packed == fp32_bytes / 4


def test_the_int8_kernels_for_one_row_and_for_many_give_the_same() -> None:
    layer, x = QuantizedLinear(nn.Linear(2048, 300)), torch.randn(5, 2048)
    x[0] = 100  # sums beyond the integers that fp32 represents exactly
    with torch.inference_mode():
        together = layer(x)
        assert layer._packed is not None or not torch.backends.mkldnn.is_available()
        assert torch.equal(together, torch.cat([layer(row[None]) for row in x]))


@pytest.mark.parametrize("name", ["tiny-translator", "tiny-encoder"])
def test_only_linears_after_relu_are_marked_nonnegative(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the mark never changes the result."""
    monkeypatch.setattr("clearhead.inference.optimize.step_library", lambda: None)
    network = optimize_for_inference(build(preset(name)).eval(), torch.int8)
    marked = [part for part, module in network.named_modules() if getattr(module, "nonnegative", False)]
    relu = name == "tiny-translator"
    assert all(part.endswith("feed_forward.down") for part in marked)
    assert len(marked) == (sum(".down" in part for part, _ in network.named_modules()) if relu else 0)
    layer = QuantizedLinear(nn.Linear(64, 32))
    x = torch.randn(9, 64).relu()
    expected = layer(x), layer(x[:1])
    layer.nonnegative, layer._packed = True, None
    for out, other in zip((layer(x), layer(x[:1])), expected, strict=True):
        assert torch.equal(out, other)


def test_loading_a_state_dict_replaces_packed_weights() -> None:
    first, second = (QuantizedLinear(nn.Linear(64, 32)) for _ in range(2))
    x = torch.randn(3, 64)
    first(x)
    first.load_state_dict(second.state_dict())
    assert torch.equal(first(x), second(x))


def test_a_cache_of_the_original_config_works_with_the_optimized_network() -> None:
    network = build(preset("tiny-llama")).eval()
    optimized, ids = optimize_for_inference(network), torch.randint(4000, (2, 8))
    cache = KVCache(network.config, 2, 8)
    with torch.inference_mode():
        parts = [optimized(ids[:, :5], cache=cache), optimized(ids[:, 5:], cache=cache)]
        torch.testing.assert_close(torch.cat(parts, dim=1), network(ids), rtol=1e-4, atol=1e-5)


@FEW
@given(generative_configs, st.integers(0, 1 << 30), st.sampled_from([1, 3]))
def test_the_number_of_workers_never_changes_the_outputs(config: ModelConfig, seed: int, beam: int) -> None:
    network, rows = random_model(config), rows_for(config, seed, count=7)
    threads = torch.get_num_threads()
    outputs = [
        search(
            network, rows, GenerationConfig(max_new_tokens=6, beam=beam, batch_size=2, workers=workers, logprobs=True)
        )
        for workers in (1, 3, 0)
    ]
    assert same_outputs(outputs[1], outputs[0])
    assert same_outputs(outputs[2], outputs[0])
    assert torch.get_num_threads() == threads
